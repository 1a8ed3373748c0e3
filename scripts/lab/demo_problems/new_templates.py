"""A harder held-out set: phrasing and compositions that training never sees, over the words it knows."""

from __future__ import annotations

import random

from .draft import Draft, MathProblem
from .math_families import DAYS, GOODS, ITEMS, PACKS


def _warehouse(draft: Draft) -> MathProblem:
    draft.words["items"], first, second = draft.pick(ITEMS), draft.between(40, 300), draft.between(5, 90)
    third = draft.between(2, 30)
    day_in, day_out = draft.rng.sample(DAYS, 2)
    draft.tell(("A shop stores {n} {items} in the morning.", "Early in the week a store keeps {n} {items}."), n=first)
    draft.tell(("A truck unloads {n} of them on {day}.", "On {day} a delivery of {n} comes in."), n=second, day=day_in)
    total = draft.compute((first, "+", second), ("there are {e} {items}", "the count is {e}"))
    draft.tell(
        ("People carry off {n} on {day}.", "On {day} customers walk out with {n} {items}."), n=third, day=day_out
    )
    final = draft.compute((total, "-", third), ("only {e} {items} remain", "the count drops to {e}"))
    draft.tell(("With how many {items} does the shop close the week?", "How big is the stock of {items} after that?"))
    return draft.finish(final)


def _earn_then_buy(draft: Draft) -> MathProblem:
    draft.people(1)
    wage, hours, price = draft.between(8, 20), draft.between(5, 9), draft.between(2, 6)
    quantity, good = draft.between(2, 5), draft.pick(GOODS)
    pay, cost = wage * hours, price * quantity
    draft.tell(("For {h} hours of work at ${w} an hour {name} gets paid.",), h=hours, w=wage)
    draft.tell(("With this money {he} buys {q} {good}s at ${p} each.",), q=quantity, good=good, p=price)
    draft.tell(("How much of the pay is left?", "How many dollars does {name} take home?"))
    draft.compute((hours, "*", wage), ("{name} earns {e} dollars",))
    draft.compute((quantity, "*", price), ("the {good}s cost {e} dollars",), good=good)
    return draft.finish(draft.compute((pay, "-", cost), ("what is left is {e}",)))


def _compare_then_share(draft: Draft) -> MathProblem:
    a, b = draft.people(2)
    draft.words |= {"a": a.name, "b": b.name, "items": draft.pick(ITEMS), "packs": draft.pick(PACKS)}
    size = draft.between(2, 9)
    first = draft.between(5, 60)
    more = draft.between(2, 40)
    more += -(2 * first + more) % size
    total = 2 * first + more
    draft.tell(("{a} owns {n} {items}, and {b} owns {m} more than that.",), n=first, m=more)
    draft.tell(("They put everything into {packs} of {s}.", "All of it goes into {packs} that hold {s} each."), s=size)
    draft.tell(("How many {packs} get full?", "Count the {packs}."))
    draft.compute((first, "+", more), ("{b} has {e} {items}",))
    draft.compute((first, "+", first + more), ("together they have {e} {items}",))
    return draft.finish(draft.compute((total, "/", size), ("that fills {e} {packs}",)))


def _garden_harvest(draft: Draft) -> MathProblem:
    draft.people(1)
    rows, plants, gone = draft.between(2, 9), draft.between(3, 12), draft.between(2, 5)
    total = rows * plants
    draft.tell(("In the garden of {name} there are {r} rows, and in every row stand {p} flowers.",), r=rows, p=plants)
    draft.tell(("A storm breaks {g} of them.", "{g} flowers die in the summer."), g=gone)
    draft.compute((rows, "*", plants), ("the rows hold {e} flowers",))
    final = draft.compute((total, "-", gone), ("taking away {g} leaves {e}",), g=gone)
    if draft.chance(0.5):
        added = draft.between(5, 40)
        draft.tell(("Then {name} plants {n} new ones.",), n=added)
        final = draft.compute((final, "+", added), ("adding {n} gives {e}",), n=added)
    draft.tell(("How many flowers stand there now?", "Count the flowers in the garden."))
    return draft.finish(final)


def _back_and_forth(draft: Draft) -> MathProblem:
    a, b = draft.people(2)
    draft.words |= {"a": a.name, "b": b.name, "items": draft.pick(ITEMS)}
    start = draft.between(30, 200)
    out, back = draft.between(10, 29), draft.between(2, 9)
    draft.tell(("Out of {n} {items}, {a} lends {o} to {b}.",), n=start, o=out)
    draft.tell(("A week later {b} returns {k}.", "Only {k} come back."), k=back)
    draft.tell(("How many {items} are with {a} after this?", "What number of {items} does {a} hold then?"))
    draft.compute((start, "-", out), ("{a} is left with {e} {items}",))
    final = start - out + back
    draft.compute((start - out, "+", back), ("adding {k} gives {e}",), k=back)
    return draft.finish(final)


NEW_FAMILIES = (_warehouse, _earn_then_buy, _compare_then_share, _garden_harvest, _back_and_forth)


def make_new_template(rng: random.Random, plain: bool = False) -> MathProblem:
    draft = Draft(rng, plain)
    return draft.pick(NEW_FAMILIES)(draft)
