"""What steps take on this machine, in seconds and in bytes, measured in a few of them: `Costs` of a
model and layout get the numbers, and plans are judged by these (run/costs.py).

`cost_meter.py` times steps and actions, and `cost_fit.py` fits prices to them; `byte_meter.py`
reads the allocator's counters; `cost_file.py` keeps both for the next job.
"""
