"""Raw text to documents: one reader of files, and the cleaning of web text with an account of everything dropped.

    recipe.toml ── plan ──▶ input splits, shared out to tasks
                              │
      documents   read ▸ repair ▸ language ▸ filter ▸ sign ──▶ spool          one task per share, on any executor
      gather      the bands of many tasks ──▶ one file                        one task per 64 of them
      match       signatures that agree in a band, verified ──▶ pairs         one task per range of bands
      group       pairs ──▶ groups ──▶ what is dropped                        one task
      finish      spool ▸ de-duplicate ▸ decontaminate ▸ split ▸ write        one task per share
      account     counts of all tasks ──▶ manifest.json                       one task

Every step is a `datatrove` pipeline step, run by datatrove's executors: processes of this machine, Ray or Slurm. A task
writes its files under temporary names and renames them when it is done, so that a run that was killed goes on with
the tasks that are missing and ends with the same bytes. Nothing here imports torch, or knows what a token is: token
files are made by `data.token_stages`, and tokenizers are handed in (`data.cleaning`).

documents, folders   what tokenizing and training a tokenizer read: texts out of files, without a recipe
streams, formats     bytes out of compressed files; rows out of files of all kinds
recipe, load         what a recipe may say, and what is wrong with it
plan, tasks          inputs -> input splits -> tasks
stages, run          a recipe as stages; from the command to the end
executors, needs     who runs the tasks; a stage starts when all tasks of the one before are done
step, tally          what a step is; counts and samples of what it drops
manifest             the account, for programs; report is its page for people
"""
