"""Raw web text to documents that can be trained on, with an account of everything that was dropped.

    recipe.toml ── plan ──▶ pieces of the inputs, one task each
                              │
      documents   read ▸ repair ▸ language ▸ filter ▸ sign ──▶ spool          a task each, on any executor
      match       signatures that agree in a band, verified ──▶ pairs
      group       pairs ──▶ groups ──▶ what is dropped                        one task
      finish      spool ▸ de-duplicate ▸ decontaminate ▸ split ▸ write
      account     counts of all tasks ──▶ manifest.json                       one task

Every step is a `datatrove` pipeline step, run by datatrove's executors: processes of this machine, Ray or Slurm. A task
writes its files under temporary names and renames them when it is done, so that a run that was killed goes on with
the tasks that are missing and ends with the same bytes. Nothing here imports torch.

recipe, load    what a recipe may say, and what is wrong with it
plan            inputs -> pieces -> tasks
stages, run     a recipe as stages; from the command to the end
executors       who runs the tasks
step, tally     what a step is; counts and samples of what it drops
manifest        the account, for programs; report is its page for people
"""
