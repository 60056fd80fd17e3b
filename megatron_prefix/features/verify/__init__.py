"""Both schedules on one step, compared: a job that proves itself (`PrefixConfig.verify`).

`both.py` runs them; `step_state.py` sees to it that the second begins where the first did;
`gradients.py`, `outputs.py` and `logs.py` are what is compared, by the policy of `judge.py`.
"""
