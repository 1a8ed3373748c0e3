"""A harder held-out set: phrasing and compositions that training never sees, over the words it knows."""

from __future__ import annotations

import random

from .draft import Draft, MathProblem
from .math_families import DAYS, GOODS, ITEMS, PACKS


def _warehouse(draft: Draft) -> MathProblem:
    items, first, second = draft.pick(ITEMS), draft.between(40, 300), draft.between(5, 90)
    third = draft.between(2, 30)
    day_in, day_out = draft.rng.sample(DAYS, 2)
    draft.tell(
        ("A shop stores {n} {items} in the morning.", "Early in the week a store keeps {n} {items}."),
        n=first,
        items=items,
    )
    draft.tell(("A truck unloads {n} of them on {day}.", "On {day} a delivery of {n} comes in."), n=second, day=day_in)
    draft.work(
        ("there are {e} {items}", "the count is {e}"), e=draft.equation(first, "+", second, first + second), items=items
    )
    draft.tell(
        ("People carry off {n} on {day}.", "On {day} customers walk out with {n} {items}."),
        n=third,
        day=day_out,
        items=items,
    )
    final = first + second - third
    draft.work(
        ("only {e} {items} remain", "the count drops to {e}"),
        e=draft.equation(first + second, "-", third, final),
        items=items,
    )
    draft.tell(
        ("With how many {items} does the shop close the week?", "How big is the stock of {items} after that?"),
        items=items,
    )
    return draft.finish(final)


def _earn_then_buy(draft: Draft) -> MathProblem:
    (who,) = draft.people(1)
    wage, hours, price = draft.between(8, 20), draft.between(5, 9), draft.between(2, 6)
    quantity, good = draft.between(2, 5), draft.pick(GOODS)
    pay, cost = wage * hours, price * quantity
    draft.tell(("For {h} hours of work at ${w} an hour {name} gets paid.",), h=hours, w=wage, name=who.name)
    draft.tell(("With this money {he} buys {q} {good}s at ${p} each.",), he=who.he, q=quantity, good=good, p=price)
    draft.tell(("How much of the pay is left?", "How many dollars does {name} take home?"), name=who.name)
    draft.work(("{name} earns {e} dollars",), name=who.name, e=draft.equation(hours, "*", wage, pay))
    draft.work(("the {good}s cost {e} dollars",), good=good, e=draft.equation(quantity, "*", price, cost))
    draft.work(("what is left is {e}",), e=draft.equation(pay, "-", cost, pay - cost))
    return draft.finish(pay - cost)


def _compare_then_share(draft: Draft) -> MathProblem:
    a, b = draft.people(2)
    items, packs, size = draft.pick(ITEMS), draft.pick(PACKS), draft.between(2, 9)
    first = draft.between(5, 60)
    more = draft.between(2, 40)
    more += -(2 * first + more) % size
    total = 2 * first + more
    draft.tell(
        ("{a} owns {n} {items}, and {b} owns {m} more than that.",), a=a.name, b=b.name, n=first, m=more, items=items
    )
    draft.tell(
        ("They put everything into {packs} of {s}.", "All of it goes into {packs} that hold {s} each."),
        packs=packs,
        s=size,
    )
    draft.tell(("How many {packs} get full?", "Count the {packs}."), packs=packs)
    draft.work(("{b} has {e} {items}",), b=b.name, items=items, e=draft.equation(first, "+", more, first + more))
    draft.work(("together they have {e} {items}",), items=items, e=draft.equation(first, "+", first + more, total))
    draft.work(("that fills {e} {packs}",), packs=packs, e=draft.equation(total, "/", size, total // size))
    return draft.finish(total // size)


def _garden_harvest(draft: Draft) -> MathProblem:
    (who,) = draft.people(1)
    rows, plants, gone = draft.between(2, 9), draft.between(3, 12), draft.between(2, 5)
    total = rows * plants
    draft.tell(
        ("In the garden of {name} there are {r} rows, and in every row stand {p} flowers.",),
        name=who.name,
        r=rows,
        p=plants,
    )
    draft.tell(("A storm breaks {g} of them.", "{g} flowers die in the summer."), g=gone)
    draft.work(("the rows hold {e} flowers",), e=draft.equation(rows, "*", plants, total))
    draft.work(("taking away {g} leaves {e}",), g=gone, e=draft.equation(total, "-", gone, total - gone))
    final = total - gone
    if draft.chance(0.5):
        added = draft.between(5, 40)
        draft.tell(("Then {name} plants {n} new ones.",), name=who.name, n=added)
        draft.work(("adding {n} gives {e}",), n=added, e=draft.equation(final, "+", added, final + added))
        final += added
    draft.tell(("How many flowers stand there now?", "Count the flowers in the garden."))
    return draft.finish(final)


def _back_and_forth(draft: Draft) -> MathProblem:
    a, b = draft.people(2)
    items, start = draft.pick(ITEMS), draft.between(30, 200)
    out, back = draft.between(10, 29), draft.between(2, 9)
    draft.tell(("Out of {n} {items}, {a} lends {o} to {b}.",), n=start, items=items, a=a.name, b=b.name, o=out)
    draft.tell(("A week later {b} returns {k}.", "Only {k} come back."), b=b.name, k=back)
    draft.tell(
        ("How many {items} are with {a} after this?", "What number of {items} does {a} hold then?"),
        a=a.name,
        items=items,
    )
    draft.work(("{a} is left with {e} {items}",), a=a.name, items=items, e=draft.equation(start, "-", out, start - out))
    final = start - out + back
    draft.work(("adding {k} gives {e}",), k=back, e=draft.equation(start - out, "+", back, final))
    return draft.finish(final)


NEW_FAMILIES = (_warehouse, _earn_then_buy, _compare_then_share, _garden_harvest, _back_and_forth)


def make_new_template(rng: random.Random, plain: bool = False) -> MathProblem:
    draft = Draft(rng, plain)
    return draft.pick(NEW_FAMILIES)(draft)
