"""`mless models`: the models on this machine, or one of them in detail."""

from __future__ import annotations

from typing import Annotated

import typer

from mless.cli.options import Json, LoadingOptions
from mless.cli.printing import plain, print_json
from mless.cli.progress import ProgressBar


def models(
    name: Annotated[
        str | None, typer.Argument(help="Describe this model: is it here, will it work, what is it like?")
    ] = None,
    *,
    loading: LoadingOptions,
    as_json: Json = False,
) -> None:
    """List the models at hand, or describe one before running it."""
    from mless.models.listing import available_models, profile

    bar = ProgressBar(quiet=as_json)
    bar.checked()  # there is no run to check, and converting a GGUF takes minutes
    try:
        content = (
            profile(
                name,
                tokenizer=loading.tokenizer,
                trust_remote_code=loading.trust_remote_code,
                say=bar.say,
                step=bar.step,
            )
            if name
            else available_models()
        )
    finally:
        bar.stop()
    if as_json:
        print_json(content)
        return
    width = max(map(len, content), default=0)
    for key, value in content.items():
        print(plain(f"{key:<{width}}  {value}"))
