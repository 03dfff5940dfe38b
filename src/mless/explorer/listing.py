"""Pages of a long list."""

from __future__ import annotations

from dataclasses import dataclass

from mless.explorer.asking import Query

#: Rows of a page, and of a list in an exported file, which has no server to ask for a second page.
PAGE, ALL = 50, 2000


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list, from 1, and which rows are on it."""

    page: int
    pages: int
    size: int

    @property
    def start(self) -> int:
        return (self.page - 1) * self.size

    @property
    def stop(self) -> int:
        return self.page * self.size


def page_of(query: Query, found: int) -> Page:
    """The page that `page` names; a number past the end is the last one. With `all` one long page."""
    size = ALL if query.has("all") else PAGE
    pages = max(1, -(-found // size))
    return Page(min(query.whole("page", 1, 999_999_999, default=1), pages), pages, size)
