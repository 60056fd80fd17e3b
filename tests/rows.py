"""Rows of the table of cases by family, on one rank and on every layout, in whatever release of
Megatron-Core is installed.

    python -m tests.rows mtp                                # families whose names begin so
    PYTHONPATH=FOLDER:$PWD python -m tests.rows mtp gdn     # another release, in a folder

Prints what is not as rows say, and how many rows ran, how many need another release, and in how
many lines the stock schedule itself fails there. The exit code is 1 if anything else is wrong.
"""

import sys

if __name__ == "__main__":
    from tests.core.trainers import stand_ins

    stand_ins.for_megatron()

import megatron.core

from megatron_prefix.lab.runtime.launch import RankError
from tests import judge, test_cases, test_cases_on_ranks


def main(families: tuple[str, ...]) -> int:
    here = test_cases.ROWS, test_cases.MTP, test_cases.CALLS, test_cases.NOT_SHARED
    every = {"one": [each for table in here for each in table]} | test_cases_on_ranks.ON_RANKS
    num, later, failed, wrong = 0, 0, 0, list[str]()
    for layout, table in every.items():
        rows = [each for each in table if each.values["model"].startswith(families)]
        possible = [each for each in rows if judge.is_possible(each)]
        num, later = num + len(possible), later + len(rows) - len(possible)
        try:
            lines = judge.run(layout, possible, timeout_s=200.0)
        except RankError as problem:  # the stock schedule may stand where one rank fails
            lines = [f"not ended: {problem}"]
        wrong += [line for line in lines if "invalid instead of" not in line]
        failed += len(lines) - sum("invalid instead of" not in line for line in lines)
        print(f"{layout}: {len(possible)} rows", *lines, sep="\n  ", flush=True)
    release = megatron.core.__version__.partition("+")[0]
    print(f"{release}: {num} rows, {len(wrong)} lines of complaint; {later} need another release;"
          f" the stock schedule fails in {failed}")  # fmt: skip
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:])))
