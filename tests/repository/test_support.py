"""docs/support.md is made of the trainers' table and of recorded runs."""

from benchmarks import support
from benchmarks.figures import read


def test_the_page_is_current():
    text = support.PAGE.read_text(encoding="utf-8")
    assert support.written(text, read()) == text, support.COMMAND


def test_every_trainer_has_layouts_that_ran():
    rows = read()
    for trainer in support.TRAINERS:
        layouts, forms = support.layouts_of(trainer, rows)
        assert layouts and forms, trainer.name
