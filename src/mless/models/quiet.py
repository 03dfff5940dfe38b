"""Silences transformers while it loads (progress bars, unexpected-key reports). What matters is checked by mless."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

#: Told how many of how many are done.
Count = Callable[[int, int], None]


@contextmanager
def quiet_transformers(weights: Count | None = None) -> Generator[None]:
    """`weights` is called for every weight loaded from a checkpoint, instead of transformers' progress bar."""
    from logging import ERROR, getLogger

    from transformers.utils import logging

    def in_place_of_a_bar(factory: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if weights is not None and args and isinstance(args[0], Collection):
            args = (_counted(args[0], weights), *args[1:])
        return factory(*args, **options)

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hook = logging.set_tqdm_hook(in_place_of_a_bar)
    # It says that a spread model's weights are elsewhere; where they are is recorded.
    hooks = getLogger("accelerate.big_modeling")
    hooks_level = hooks.level
    hooks.setLevel(ERROR)
    try:
        yield
    finally:
        hooks.setLevel(hooks_level)
        logging.set_tqdm_hook(hook)
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


@contextmanager
def counting_gguf_tensors(count: Count) -> Generator[None]:
    """transformers' GGUF reader always draws a progress bar; here `count` is called instead."""
    from transformers import modeling_gguf_pytorch_utils as reader

    def in_place_of_a_bar(tensors: Collection[Any], **options: Any) -> Iterator[Any]:
        return _counted(tensors, count)

    bar: Any = getattr(reader, "tqdm", None)
    if bar is not None:
        reader.tqdm = in_place_of_a_bar
    try:
        yield
    finally:
        if bar is not None:
            reader.tqdm = bar


@contextmanager
def reading_gguf_once() -> Generator[None]:
    """Inside the block a GGUF's header is parsed once, however often it is opened. Its vocabulary alone takes seconds each time."""
    import gguf

    own: Any = gguf.GGUFReader
    opened: dict[tuple[Any, ...], Any] = {}

    class Reader(own):
        # Slicing a memory map makes a new memory map for every string, which is slow; a plain view does not.
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)

    def reader(path: Any, *mode: Any) -> Any:
        key = (str(path), *mode)
        if key not in opened:
            opened[key] = Reader(path, *mode)
        return opened[key]

    holder: Any = gguf
    holder.GGUFReader = reader
    try:
        yield
    finally:
        holder.GGUFReader = own


def _counted(things: Collection[Any], count: Count) -> Iterator[Any]:
    for done, thing in enumerate(things, start=1):
        yield thing
        count(done, len(things))
