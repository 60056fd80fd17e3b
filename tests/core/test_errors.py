"""Messages are short, whatever a user gives: the begin, the fix, and how much is between."""

from __future__ import annotations

from datetime import timedelta

import pytest

from megatron_prefix.auto.settings import read_config
from megatron_prefix.errors import MOST_LETTERS, UserError, bounded, listed
from megatron_prefix.lab.runtime import hosts
from tests.harness.command_line import BUNDLED, failure

LONG = "x" * 5000


def test_a_long_line_keeps_its_begin_and_its_fix() -> None:
    text = f"begin {LONG}; give less"
    line = bounded(text)
    assert line.startswith("begin xxx") and line.endswith("xxx; give less")
    assert "… 4,117 more characters …" in line and len(line) < MOST_LETTERS
    assert str(UserError(text)) == line == bounded(line)
    table = "\n".join([LONG, LONG])
    assert bounded(table).endswith(f"\n{LONG}"), "a table stays"
    assert bounded("x" * MOST_LETTERS) == "x" * MOST_LETTERS


def test_a_long_list_tells_how_many_more() -> None:
    assert listed([3, 1, 2]) == "1, 2, 3"
    assert listed(range(1024), 8) == "0, 1, 2, 3, 4, 5, 6, 7 and 1016 more"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", BUNDLED, "--model", LONG],
        ["plan", LONG],
        ["plan", BUNDLED, "--csv", LONG],
        ["plan", BUNDLED, "--pp", LONG],
        ["show", LONG],
        ["matrix", "--only", LONG],
        ["train", BUNDLED, "--set", f"{LONG}=1"],
        ["train", BUNDLED, "--memory", LONG],
        ["generate", "out", "--tree", LONG],
        [LONG],
    ],
    ids=lambda arguments: " ".join(arguments)[:30],
)
def test_no_line_of_the_command_line_is_long(capsys, arguments: list[str]) -> None:
    assert len(failure(capsys, *arguments)) <= MOST_LETTERS + 100


def test_no_message_of_a_setting_is_long(tmp_path) -> None:
    file = tmp_path / "prefix.toml"
    for line in (f"mode = '{LONG}'", f"{LONG} = 1", f"plan = '{LONG}'", f"cost_file = '{LONG}'"):
        file.write_text(line, encoding="utf-8")
        with pytest.raises(UserError) as caught:
            read_config({"MEGATRON_PREFIX_CONFIG": str(file)})
        assert len(str(caught.value)) <= MOST_LETTERS


def test_ranks_of_a_large_job_are_not_all_listed() -> None:
    class Store:
        """One in which nobody else is."""

        def set(self, *_: object) -> None: ...

        def wait(self, *_: object) -> None:
            from torch.distributed import DistError

            raise DistError

        def check(self, _: object) -> bool:
            return False

    with pytest.raises(UserError, match=r"^ranks 0, 1, .* and 1016 more of 1024 have not joined"):
        hosts.meet(Store(), 0, 1024, timedelta(0))  # type: ignore[arg-type]
