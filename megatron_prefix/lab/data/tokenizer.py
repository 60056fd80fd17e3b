"""Text to token ids, for importers. The packages for it are extras, imported when used."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_prefix.errors import UserError, shown
from megatron_prefix.lab.data.jsonl import Fault, user_error

Message = dict[str, Any]
_OPTION = "--tokenizer"


class Tokenizer(Protocol):
    """What an importer needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """All token ids of `text`; with those that the tokenizer adds to it, if asked for."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as text, special tokens included, by the model's chat template."""


def token_ids(
    tokenizer: Tokenizer, text: str, field: str, *, special: bool = False, continues: bool = False
) -> list[int]:
    """The ids of what a row's `field` holds; a `Fault` if the tokenizer has none for it.

    Args:
        tokenizer: that encodes it.
        text: from the row.
        field: its name.
        special: whether to add what the tokenizer adds to a whole text, such as BOS and EOS.
        continues: whether the text goes on where another ended.
    """
    try:
        if continues and isinstance(tokenizer, _HubTokenizer):
            return tokenizer.encode_continued(text)
        return tokenizer.encode(text, add_special_tokens=special)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  (tokenizers may raise anything)
        problem = f"the tokenizer cannot encode it ({shown(str(error), 120)})"
        raise Fault(field, f"{problem}; give the tokenizer of the model that wrote it") from None


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a `tokenizer.json` (no chat template), or of a transformers name or folder.

    Nothing from the name or folder is executed. Errors: `UserError` when the package is not
    installed or the tokenizer cannot be loaded.
    """
    try:
        return _FileTokenizer(name) if name.endswith(".json") else _HubTokenizer(name)
    except ImportError as error:
        package = "tokenizers" if name.endswith(".json") else "transformers"
        text = f"needs the package {package} ({error}); pip install {package} jinja2"
        raise user_error(_OPTION, text) from None
    except Exception as error:  # noqa: BLE001  (their loaders may raise anything)
        first = str(error).strip().splitlines() or [type(error).__name__]
        text = f"cannot be loaded from {name!r} ({first[0]})"
        fix = "give a tokenizer.json, or a folder or name that transformers knows"
        raise user_error(_OPTION, f"{text}; {fix}") from None


@contextlib.contextmanager
def _silent(package: str) -> Iterator[None]:
    """Keeps a package's log to itself: what it tells of every attempt is in its last error."""
    logger = logging.getLogger(package)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class _FileTokenizer:
    """A `tokenizer.json`, read with `tokenizers`."""

    def __init__(self, path: str) -> None:
        package = importlib.import_module("tokenizers")
        if not Path(path).is_file():
            raise FileNotFoundError("no such file")
        self._path = path
        self._fast = package.Tokenizer.from_file(path)
        self._fast.no_truncation()  # the file may say how to cut and pad
        self._fast.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        text = f"no chat template in {self._path!r}; give the folder of the model for transformers"
        raise UserError(f"{_OPTION}: {text}")


class _HubTokenizer:
    """A tokenizer with its chat template, read with `transformers`: from files that are here, else
    from the hub."""

    def __init__(self, name: str) -> None:
        package = importlib.import_module("transformers")
        load = functools.partial(
            package.AutoTokenizer.from_pretrained, name, trust_remote_code=False
        )
        with _silent("huggingface_hub"):
            try:
                self._auto = load(local_files_only=True)
            except Exception:  # noqa: BLE001  (see load_tokenizer)
                self._auto = load()
        self._auto.model_max_length = sys.maxsize  # it warns of longer texts, but does not cut them

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(self._auto.encode(text, add_special_tokens=add_special_tokens))

    def encode_continued(self, text: str) -> list[int]:
        """Token ids of a text that follows another: without the space that SentencePiece adds."""
        if not self._adds_space:
            return self.encode(text)
        before, whole = self.encode("\n"), self.encode("\n" + text)
        if whole[: len(before)] != before:
            raise ValueError("it merges the first characters with the line break before them")
        return whole[len(before) :]

    @functools.cached_property
    def _adds_space(self) -> bool:
        first = self._auto.convert_ids_to_tokens(self.encode("a"))[:1]
        return str(first[0]).startswith("\u2581") if first else False

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        return str(
            self._auto.apply_chat_template(
                list(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        )
