"""Colonnade's models in the lm-evaluation-harness (`lm_eval`).

    python -m colonnade.lm_eval --model colonnade --model_args checkpoint=runs/books,tp=2 --tasks …

takes the options of `lm_eval` and is it, with one model more. In a program, `import colonnade.lm_eval.model` registers
that model for `lm_eval.simple_evaluate(model="colonnade", …)`. The harness asks no installed package for models of its
own, so that its own command does not know this one.
"""
