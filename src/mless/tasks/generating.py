"""Generated arithmetic: seeded questions of six difficulties whose answers are exact integers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mless.errors import BadData
from mless.values import Item

# From 0 or 10: expressions. Counts start at 2, so that plurals are always right.
DIGITS = range(10)
BELOW_100 = range(100)
TWO_DIGITS = range(10, 100)
FEW = range(2, 10)
NAMES = ("Amira", "Ben", "Chiara", "Dmitri", "Eun-ji", "Femi", "Greta", "Hugo", "Ines", "Jonas")


@dataclass(frozen=True)
class Kind:
    """One form of question: `make` turns one choice per slot into question and answer, never two into the same."""

    make: Callable[..., tuple[str, int]]
    slots: tuple[Sequence[int] | Sequence[str], ...]

    @property
    def size(self) -> int:
        return math.prod(len(slot) for slot in self.slots)


def _sum(a: int, b: int) -> tuple[str, int]:
    return f"What is {a} + {b}?", a + b


def _difference(a: int, b: int) -> tuple[str, int]:
    return f"What is {a} - {b}?", a - b


def _sum_sum(a: int, b: int, c: int) -> tuple[str, int]:
    return f"What is {a} + {b} + {c}?", a + b + c


def _sum_difference(a: int, b: int, c: int) -> tuple[str, int]:
    return f"What is {a} + {b} - {c}?", a + b - c


def _difference_sum(a: int, b: int, c: int) -> tuple[str, int]:
    return f"What is {a} - {b} + {c}?", a - b + c


def _difference_difference(a: int, b: int, c: int) -> tuple[str, int]:
    return f"What is {a} - {b} - {c}?", a - b - c


def _product(a: int, b: int) -> tuple[str, int]:
    return f"What is {a} × {b}?", a * b


def _product_then_sum(a: int, b: int, c: int) -> tuple[str, int]:
    return f"What is {a} × {b} + {c}?", a * b + c


def _product_then_difference(a: int, b: int, c: int) -> tuple[str, int]:
    return f"What is {a} × {b} - {c}?", a * b - c


def _sum_then_product(a: int, b: int, c: int) -> tuple[str, int]:
    return f"What is ({a} + {b}) × {c}?", (a + b) * c


def _difference_then_product(a: int, b: int, c: int) -> tuple[str, int]:
    return f"What is ({a} - {b}) × {c}?", (a - b) * c


def _boxes(name: str, fruit: str, boxes: int, each: int, given: int) -> tuple[str, int]:
    return (
        f"{name} fills {boxes} boxes with {each} {fruit} each and then gives {given} of the {fruit} to a neighbour. "
        f"How many {fruit} does {name} have left?"
    ), boxes * each - given


def _bus(riders: int, off: int, on: int, off_later: int) -> tuple[str, int]:
    return (
        f"A bus leaves the depot with {riders} passengers. At the first stop {off} people get off and {on} get on. "
        f"At the second stop another {off_later} get off. How many passengers are on the bus now?"
    ), riders - off + on - off_later


def _tickets(place: str, adult: int, child: int, adults: int, children: int) -> tuple[str, int]:
    return (
        f"A ticket for the {place} costs {adult} euros for an adult and {child} euros for a child. "
        f"How many euros do {adults} adults and {children} children pay altogether?"
    ), adult * adults + child * children


def _rows(plant: str, rows: int, each: int, lost: int) -> tuple[str, int]:
    return (
        f"A gardener plants {rows} rows of {plant}, with {each} plants in each row. In every row {lost} plants die "
        "during the winter. How many plants are still alive in spring?"
    ), rows * (each - lost)


def _pages(name: str, read: int, daily: int, days: int, whole: int) -> tuple[str, int]:
    return (
        f"{name} has already read {read} pages of a book that has {whole} pages, and then reads {daily} pages a day "
        f"for {days} days. How many pages are still unread after that?"
    ), whole - read - daily * days


def _bags(bread: str, trays: int, bags_per_tray: int, per_bag: int) -> tuple[str, int]:
    # The tray is given by what is on it, a multiple of the bag, so that the division comes out even.
    return (
        f"A bakery bakes {trays} trays of {bread} with {bags_per_tray * per_bag} {bread} on each tray. All of them are "
        f"packed into bags of {per_bag}. How many bags are filled?"
    ), trays * bags_per_tray


def _concert(singers: int, times: int, ill: int) -> tuple[str, int]:
    word = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[times]
    return (
        f"A school choir has {singers} singers, and the school orchestra has {word} as many members; nobody belongs to "
        f"both. On the day of the concert {ill} of all these people are ill. How many can perform?"
    ), singers * (1 + times) - ill


def _savings(name: str, thing: str, weekly: int, weeks: int, price: int, gift: int) -> tuple[str, int]:
    return (
        f"{name} saves {weekly} euros a week for {weeks} weeks, then buys a {thing} for {price} euros and afterwards "
        f"gets {gift} euros as a birthday present. How many euros does {name} have now?"
    ), weekly * weeks - price + gift


def _rope(pieces: int, length: int, cut: int) -> tuple[str, int]:
    return (
        f"A rope of {pieces * length} metres is cut into {pieces} equal pieces, and each piece is then shortened by "
        f"{cut} metres. How many metres long is each piece now?"
    ), length - cut


SINGLE_DIGITS = (Kind(_sum, (DIGITS, DIGITS)), Kind(_difference, (DIGITS, DIGITS)))

# Ranges are chosen so that no story can end, or pass through, a count below zero.
DIFFICULTIES: dict[int, tuple[Kind, ...]] = {
    1: SINGLE_DIGITS,
    2: (
        *SINGLE_DIGITS,
        Kind(_sum, (TWO_DIGITS, TWO_DIGITS)),
        Kind(_difference, (TWO_DIGITS, TWO_DIGITS)),
        Kind(_product, (DIGITS, DIGITS)),
    ),
    3: (
        Kind(_product, (TWO_DIGITS, TWO_DIGITS)),
        Kind(_product_then_sum, (TWO_DIGITS, FEW, TWO_DIGITS)),
        Kind(_product_then_difference, (TWO_DIGITS, FEW, TWO_DIGITS)),
        Kind(_sum_then_product, (TWO_DIGITS, TWO_DIGITS, FEW)),
        Kind(_difference_then_product, (TWO_DIGITS, TWO_DIGITS, FEW)),
    ),
    4: (
        Kind(_boxes, (NAMES, ("apples", "pears", "plums", "lemons"), range(3, 13), range(6, 16), range(2, 18))),
        Kind(_bus, (range(30, 50), range(2, 15), range(2, 20), range(2, 15))),
        Kind(_tickets, (("zoo", "museum", "castle", "swimming pool"), range(9, 25), range(3, 9), FEW, FEW)),
        Kind(_rows, (("tulips", "roses", "cabbages", "strawberries"), range(3, 13), range(8, 21), range(2, 8))),
        Kind(_pages, (NAMES, range(10, 41), range(5, 21), FEW, range(221, 401))),
        Kind(_bags, (("rolls", "muffins", "pretzels", "scones"), range(3, 13), range(3, 10), range(2, 9))),
        Kind(_concert, (range(12, 41), range(2, 6), range(2, 13))),
        Kind(
            _savings, (NAMES, ("lamp", "football", "jacket"), range(12, 31), range(5, 13), range(20, 61), range(5, 31))
        ),
        Kind(_rope, (range(3, 13), range(10, 41), FEW)),
    ),
    # Easy like 1, but large enough to draw a sample from. The numbers are names: 5 and 6 came later and are easier than 3 and 4.
    5: (Kind(_sum, (BELOW_100, BELOW_100)), Kind(_difference, (BELOW_100, BELOW_100))),
    6: tuple(
        Kind(make, (DIGITS, DIGITS, DIGITS))
        for make in (_sum_sum, _sum_difference, _difference_sum, _difference_difference)
    ),
}


def distinct_questions(difficulty: int) -> int:
    """How many different questions a difficulty has."""
    if difficulty not in DIFFICULTIES:
        raise BadData(f"no arithmetic of difficulty {difficulty}: difficulties are 1 to {max(DIFFICULTIES)}")
    return sum(kind.size for kind in DIFFICULTIES[difficulty])


def arithmetic(count: int = 200, difficulty: int = 1, seed: int = 0) -> list[Item]:
    """`count` different questions; the first n of a longer set are the set of n with the same difficulty and seed.

    Difficulty 1: one-digit sums and differences. 2: also two-digit ones, and one-digit products. 3: two-digit products and two-step
    expressions. 4: word problems of two or three steps. 5: sums and differences of numbers below 100. 6: of three digits.
    `distinct_questions` says how many each has. Difficulty 1 has 200, so 200 items are all of it and not a sample.
    """
    distinct = distinct_questions(difficulty)
    if count < 1:
        raise BadData(f"arithmetic: count must be at least 1 question, got {count}")
    kinds = DIFFICULTIES[difficulty]
    if count > distinct:
        raise BadData(
            f"arithmetic of difficulty {difficulty} has only {distinct} distinct questions, so it cannot give {count}; "
            "ask for fewer, or for another difficulty (5 has 20000 sums and differences of numbers below 100)"
        )
    rng = random.Random(f"arithmetic {difficulty} {seed}")

    def below(stop: int) -> int:
        # Only random() is promised to give the same numbers in every version of Python.
        return int(rng.random() * stop)

    open_kinds = list(kinds)
    drawn = dict.fromkeys(kinds, 0)
    items: dict[str, Item] = {}
    while len(items) < count:
        kind = open_kinds[below(len(open_kinds))]
        question, answer = kind.make(*(slot[below(len(slot))] for slot in kind.slots))
        if question in items:
            continue
        items[question] = Item(f"arithmetic-{difficulty}-{len(items) + 1:04d}", question, str(answer))
        drawn[kind] += 1
        if drawn[kind] == kind.size:
            open_kinds.remove(kind)
    return list(items.values())
