"""Math word problems whose phrasing the demo model is trained on; one function per family."""

from __future__ import annotations

import random
from collections.abc import Callable

from .draft import Draft, MathProblem

ITEMS = (
    "apples", "marbles", "stickers", "pens", "books", "cards", "coins", "shells", "cookies", "stamps", "beads", "pears",
    "balls", "plums", "stones", "candles", "ribbons", "buttons", "tickets", "flowers", "lemons", "toys", "cups", "keys",
    "nuts", "seeds", "bottles", "eggs", "blocks", "photos",
)  # fmt: skip
GOODS = "pen book mug lamp scarf ball toy cake melon plant brush hat shirt poster kite candle notebook bag".split()  # noqa: SIM905
PLACES = (
    "at the market",
    "from a friend",
    "in the park",
    "at school",
    "in a shop",
    "near the river",
    "on the way home",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
PACKS = ("boxes", "bags", "packs", "jars", "trays", "baskets")

GAIN_FACTS = (
    "{He} buys {n} more.", "{He} finds {n} more {place}.", "{friend} gives {him} {n} {items}.",
    "Then {he} gets {n} more.",
    "{He} picks up {n} {items} {place}.", "Later {he} wins {n} {items}.", "{friend} brings {him} {n} more.",
)  # fmt: skip
GAIN_LINES = (
    "there are {e} {items}", "{name} has {e} {items}", "the count is {e}", "adding {n} gives {e}",
    "that makes {e} {items}",
    "the pile grows to {e}", "{n} more makes {e}", "we add {n} and get {e}", "{he} now owns {e} {items}",
)  # fmt: skip
LOSS_FACTS = (
    "{He} gives {n} to {friend}.", "{He} loses {n} {place}.", "{He} sells {n} of them.", "Then {n} of them break.",
    "{friend} takes {n} {items}.", "{He} throws away {n}.", "Later {he} trades away {n} {items}.",
)  # fmt: skip
LOSS_LINES = (
    "there are {e} {items} left", "{name} is left with {e} {items}", "the count drops to {e}",
    "taking away {n} leaves {e}",
    "{he} still has {e} {items}", "we subtract {n} and get {e}", "the pile shrinks to {e}", "only {e} {items} remain",
)  # fmt: skip
PRODUCT_LINES = (
    "{a} {packs} hold {e} {items}", "the {packs} bring {e} {items}", "{e} {items} are in the {packs}",
    "in the {packs} there are {e}",
    "{a} times {b} is {e}",
)  # fmt: skip
PACK_FACTS = (
    "{He} buys {a} {packs} of {b} {items} each.", "{friend} sends {him} {a} {packs} with {b} {items} in each.",
    "Then {he} opens {a} {packs} that hold {b} each.",
)  # fmt: skip
DOUBLE_FACTS = ("Then {he} doubles what {he} has.", "{friend} doubles the pile.", "After that the number doubles.")
DOUBLE_LINES = (
    "doubling gives {e}",
    "twice that is {e}",
    "the pile doubles to {e}",
    "{name} has {e} {items}",
    "two times as many is {e}",
)
HALF_FACTS = ("{He} gives half of them to {friend}.", "Then {he} sells half of the {items}.", "Half of them get lost.")
HALF_LINES = (
    "half of that is {e}",
    "{name} keeps {e} {items}",
    "halving leaves {e}",
    "only {e} {items} remain",
    "we divide by 2: {e}",
)
START_FACTS = (
    "{name} has {n} {items}.", "{name} starts with {n} {items}.", "At first {name} owns {n} {items}.",
    "There are {n} {items} on {name}'s table.",
    "{name} keeps {n} {items} in a box.",
)  # fmt: skip
START_LINES = (
    "{name} starts with {n} {items}",
    "we begin with {n}",
    "at first there are {n} {items}",
    "the first count is {n}",
)
HOW_MANY_NOW = (
    "How many {items} does {name} have now?", "How many {items} are there in the end?",
    "Find the number of {items} left.",
    "What is the final count of {items}?", "How many does {he} have at the end?",
)  # fmt: skip


def _inventory_step(draft: Draft, count: int) -> int:
    draft.words["place"] = draft.pick(PLACES)
    kinds = ["gain", "gain", "pack"] if count < 20 else ["gain", "loss", "loss", "pack", "double", "half"]
    kind = draft.pick(kinds)
    if kind == "double" and count <= 450:
        draft.tell(DOUBLE_FACTS)
        return draft.compute((count, "*", 2), DOUBLE_LINES, "all {items} double")
    if kind == "half" and count % 2 == 0:
        draft.tell(HALF_FACTS)
        return draft.compute((count, "/", 2), HALF_LINES, "half of the {items} go")
    if kind == "pack" and count < 880:
        a, b, packs = draft.between(2, 9), draft.between(2, 12), draft.pick(PACKS)
        draft.tell(PACK_FACTS, a=a, b=b, packs=packs)
        draft.compute((a, "*", b), PRODUCT_LINES, "{a} {packs} of {b} come", a=a, b=b, packs=packs)
        return draft.compute((count, "+", a * b), GAIN_LINES, n=a * b)
    if kind in ("gain", "pack") and count < 950:
        n = draft.between(2, min(99, 999 - count))
        draft.tell(GAIN_FACTS, n=n)
        return draft.compute((count, "+", n), GAIN_LINES, "{n} {items} come", n=n)
    n = draft.between(2, min(count - 1, 120))
    draft.tell(LOSS_FACTS, n=n)
    return draft.compute((count, "-", n), LOSS_LINES, "{n} {items} go", n=n)


def inventory(draft: Draft) -> MathProblem:
    _, friend = draft.people(2)
    draft.words |= {"friend": friend.name, "items": draft.pick(ITEMS)}
    count = draft.between(3, 20) if draft.chance(0.3) else draft.between(20, 400)
    draft.tell(START_FACTS, n=count)
    if draft.chance(0.5):
        draft.work(START_LINES, n=count)
    for _ in range(draft.pick((2, 3, 3, 4, 4, 5, 5))):
        count = _inventory_step(draft, count)
    draft.tell(HOW_MANY_NOW)
    return draft.finish(count)


BUY_FACTS = (
    "{He} buys {q} {good}s at ${p} each.",
    "{q} {good}s cost ${p} each.",
    "{He} takes {q} {good}s for ${p} apiece.",
)
BUY_LINES = (
    "the {good}s cost {e} dollars", "{q} {good}s come to {e}", "for the {good}s {he} pays {e}",
    "{e} is the price of the {good}s",
    "{q} times {p} is {e}", "the {good} part is {e} dollars",
)  # fmt: skip
TOTAL_LINES = (
    "the total is {e}",
    "together that is {e} dollars",
    "all of it costs {e}",
    "the sum is {e}",
    "in total {name} pays {e}",
)
COUPON_FACTS = ("A coupon takes ${n} off.", "The shop gives {him} ${n} off.", "There is a ${n} discount.")
COUPON_LINES = (
    "with the coupon it is {e}",
    "the discount makes it {e}",
    "we take off {n}: {e}",
    "minus {n} the price is {e}",
)
CHANGE_LINES = ("the change is {e}", "{name} gets back {e} dollars", "{he} has {e} dollars left", "what remains is {e}")


def shopping(draft: Draft) -> MathProblem:
    draft.people(1)
    draft.tell(
        ("{name} goes shopping.", "{name} visits a store.", "{name} is at the market.", "{name} needs a few things.")
    )
    costs = []
    for good in draft.rng.sample(GOODS, draft.pick((1, 2, 2, 3))):
        quantity, price = draft.between(2, 9), draft.between(2, 12)
        draft.words |= {"q": quantity, "p": price, "good": good}
        draft.tell(BUY_FACTS)
        costs.append(draft.compute((quantity, "*", price), BUY_LINES, "there are {q} {good}s for {p} dollars each"))
    total = sum(costs)
    if len(costs) > 1:
        draft.work(TOTAL_LINES, e=draft.sum_of(costs))
    if draft.chance(0.4):
        off = draft.between(1, min(total - 1, 15))
        draft.tell(COUPON_FACTS, n=off)
        total = draft.compute((total, "-", off), COUPON_LINES, "the price drops by {n} dollars", n=off)
    if draft.chance(0.5):
        draft.tell(("How much does {he} pay?", "What is the total cost?", "How many dollars does {name} spend?"))
        return draft.finish(total)
    purse = min(n for n in (20, 50, 100, 150, 200, 300, 400) if n > total)
    draft.tell(("{He} has ${n}.", "{He} pays with ${n}.", "{He} hands over ${n}."), n=purse)
    draft.tell(("How much change does {he} get?", "How much money is left?", "How many dollars remain?"))
    return draft.finish(draft.compute((purse, "-", total), CHANGE_LINES, "{name} has {n} dollars", n=purse))


MORE_FACTS = ("{b} has {n} more {items} than {a}.", "{b} owns {n} {items} more than {a}.", "{b} has {n} more than {a}.")
FEWER_FACTS = (
    "{b} has {n} fewer {items} than {a}.",
    "{b} owns {n} {items} less than {a}.",
    "{b} has {n} fewer than {a}.",
)
TIMES_FACTS = ("{b} has {n} times as many {items} as {a}.", "{b} owns {n} times as many as {a}.")
HAS_LINES = (
    "{b} has {e} {items}",
    "{b} owns {e}",
    "for {b} we get {e}",
    "the number for {b} is {e}",
    "{e} {items} belong to {b}",
)
ALL_LINES = (
    "together they have {e} {items}",
    "the total is {e}",
    "all of them own {e}",
    "we add up: {e}",
    "in total that is {e}",
)
GAP_LINES = ("the difference is {e}", "{b} has {e} more", "the gap is {e} {items}", "subtracting gives {e}")


def comparison(draft: Draft) -> MathProblem:
    people = draft.people(draft.pick((2, 3, 3, 4)))
    draft.words["items"] = draft.pick(ITEMS)
    counts = [draft.between(5, 90)]
    draft.tell(START_FACTS[:3], n=counts[0])
    for i in range(1, len(people)):
        j = draft.between(max(0, i - 2), i - 1)
        base = counts[j]
        draft.words |= {"a": people[j].name, "b": people[i].name}
        if base <= 99 and draft.chance(0.3):
            n = draft.between(2, 4)
            draft.tell(TIMES_FACTS, n=n)
            sign, given = "*", "{b} has {n} times as many as {a}"
        elif base > 12 and draft.chance(0.5):
            n = draft.between(2, min(base - 2, 60))
            draft.tell(FEWER_FACTS, n=n)
            sign, given = "-", "{b} has {n} fewer than {a}"
        else:
            n = draft.between(2, 80)
            draft.tell(MORE_FACTS, n=n)
            sign, given = "+", "{b} has {n} more than {a}"
        counts.append(draft.compute((base, sign, n), HAS_LINES, given, n=n))
    if draft.chance(0.7) or counts[-1] == counts[0]:
        draft.tell(
            (
                "How many {items} do they have in total?",
                "Find the number of {items} they own together.",
                "How many is that altogether?",
            )
        )
        draft.work(ALL_LINES, e=draft.sum_of(counts))
        return draft.finish(sum(counts))
    high, low = (-1, 0) if counts[-1] > counts[0] else (0, -1)
    draft.words |= {"b": people[high].name, "a": people[low].name}
    draft.tell(("How many more {items} does {b} have than {a}?", "By how many {items} is {b} ahead of {a}?"))
    return draft.finish(draft.compute((counts[high], "-", counts[low]), GAP_LINES))


SHIFT_FACTS = ("{He} works {h} hours on {day}.", "On {day} {he} works {h} hours.", "{day}: {h} hours.")
SHIFT_LINES = (
    "on {day} {he} earns {e} dollars",
    "{day} pays {e}",
    "{h} hours bring {e}",
    "for {day} that is {e} dollars",
)
EARN_LINES = ("{name} earns {e} dollars", "the pay is {e}", "that brings {e} dollars", "all hours pay {e}")
BONUS_LINES = (
    "with the extra {n} it is {e}",
    "the bonus makes it {e}",
    "we add the bonus: {e}",
    "plus {n} that is {e}",
)
SPEND_LINES = (
    "after paying {n} there is {e}",
    "{he} keeps {e} dollars",
    "what is left is {e}",
    "minus {n} that leaves {e}",
)


def wages(draft: Draft) -> MathProblem:
    draft.people(1)
    wage = draft.between(6, 20)
    draft.tell(("{name} earns ${w} an hour.", "{name} makes ${w} per hour.", "{name}'s job pays ${w} an hour."), w=wage)
    days = draft.rng.sample(DAYS, draft.pick((1, 2, 2, 3)))
    hours = [draft.between(2, 9) for _ in days]
    for day, h in zip(days, hours, strict=True):
        draft.tell(SHIFT_FACTS, day=day, h=h)
    total = wage * sum(hours)
    if len(days) > 1 and sum(hours) <= 14 and draft.chance(0.5):
        draft.work(("the hours add up to {e}", "{he} works {e} hours", "in hours that is {e}"), e=draft.sum_of(hours))
        draft.compute((sum(hours), "*", wage), EARN_LINES, "each hour pays {w} dollars", w=wage)
    else:
        for day, h in zip(days, hours, strict=True):
            draft.compute((h, "*", wage), SHIFT_LINES, "{h} hours pay {w} dollars each", w=wage, day=day, h=h)
        if len(days) > 1:
            draft.work(EARN_LINES, e=draft.sum_of([h * wage for h in hours]))
    if draft.chance(0.4):
        bonus = draft.between(5, 60)
        draft.tell(("{He} also gets a bonus of ${n}.", "There is a bonus of ${n}.", "The boss adds ${n}."), n=bonus)
        total = draft.compute((total, "+", bonus), BONUS_LINES, "the bonus is {n} dollars", n=bonus)
    if draft.chance(0.5):
        draft.tell(("How much does {he} earn?", "How many dollars is that?", "What is {name}'s pay?"))
        return draft.finish(total)
    spent = draft.between(2, min(total - 1, 80))
    draft.tell(("{He} spends ${n} on food.", "{He} pays ${n} for a bus card.", "A new bag costs {him} ${n}."), n=spent)
    draft.tell(("How much is left?", "How many dollars does {name} keep?", "What remains of the money?"))
    return draft.finish(draft.compute((total, "-", spent), SPEND_LINES, "{name} spends {n} dollars", n=spent))


TRIPS = (("drives", "km"), ("rides", "km"), ("flies", "miles"), ("sails", "miles"), ("travels", "km"))
LEG_LINES = (
    "the leg is {e} {unit}",
    "{h} hours at {s} make {e} {unit}",
    "that part covers {e}",
    "{name} covers {e} {unit}",
    "{s} times {h} is {e}",
)


def travel(draft: Draft) -> MathProblem:
    draft.people(1)
    verb, unit = draft.pick(TRIPS)
    draft.words |= {"verb": verb, "unit": unit}
    legs = []
    for i in range(draft.pick((1, 2, 2, 3))):
        speed, h = draft.between(3, 9) * draft.pick((1, 10, 10)), draft.between(2, 9)
        start = "{name}" if i == 0 else draft.pick(("Then {he}", "After a rest {he}", "Next {he}"))
        draft.tell(
            (
                start + " {verb} {h} hours at {s} {unit} an hour.",
                start + " {verb} at {s} {unit} per hour for {h} hours.",
            ),
            h=h,
            s=speed,
        )
        draft.compute((speed, "*", h), LEG_LINES, "{name} {verb} {h} hours at {s} {unit}", h=h, s=speed)
        legs.append(speed * h)
    total = sum(legs)
    if len(legs) > 1:
        draft.work(
            ("the whole way is {e} {unit}", "all legs make {e}", "we add the legs: {e}", "so far that is {e} {unit}"),
            e=draft.sum_of(legs),
        )
    if total > 900 or draft.chance(0.5):
        draft.tell(("How many {unit} is that?", "How far does {he} go?", "What is the whole distance?"))
        return draft.finish(total)
    trip = total + draft.between(3, 99)
    draft.tell(
        (
            "The trip is {n} {unit} long.",
            "The goal is {n} {unit} away from the start.",
            "In all {he} must cover {n} {unit}.",
        ),
        n=trip,
    )
    draft.tell(("How many {unit} are left?", "How far is it still?", "What distance remains?"))
    return draft.finish(
        draft.compute(
            (trip, "-", total),
            ("there are {e} {unit} left", "the rest is {e}", "it is still {e} {unit}", "{e} remain"),
            "the trip has {n} {unit}",
            n=trip,
        )
    )


def reading(draft: Draft) -> MathProblem:
    draft.people(1)
    pages, days, extra = draft.between(4, 40), draft.between(2, 9), draft.between(2, 40)
    draft.words |= {"p": pages, "d": days}
    read = pages * days
    total = read + extra + draft.between(5, 200)
    draft.tell(
        (
            "{name} reads a book of {t} pages.",
            "{name}'s book has {t} pages.",
            "A book with {t} pages lies on {name}'s desk.",
        ),
        t=total,
    )
    draft.tell(("{He} reads {p} pages a day for {d} days.", "For {d} days {he} reads {p} pages each day."))
    draft.compute(
        (pages, "*", days),
        (
            "in {d} days that is {e} pages",
            "{he} reads {e} pages",
            "{p} times {d} gives {e}",
            "the first days cover {e} pages",
        ),
        "{name} reads {p} pages a day for {d} days",
    )
    if draft.chance(0.6):
        draft.tell(
            (
                "Then {he} reads {x} pages more.",
                "One evening {he} adds {x} pages.",
                "On the next day {he} reads {x} pages.",
            ),
            x=extra,
        )
        read = draft.compute(
            (read, "+", extra),
            ("with {x} more it is {e}", "now {e} pages are done", "adding {x} makes {e}", "{he} is at page {e}"),
            "{name} reads {x} pages more",
            x=extra,
        )
    draft.tell(("How many pages are left?", "How many pages remain?", "How many pages must {he} still read?"))
    return draft.finish(
        draft.compute(
            (total, "-", read),
            (
                "there are {e} pages left",
                "{e} pages remain",
                "the rest is {e}",
                "we subtract: {e}",
                "{name} still has {e}",
            ),
            "the book has {t} pages",
            t=total,
        )
    )


def packing(draft: Draft) -> MathProblem:
    _, friend = draft.people(2)
    items, packs = draft.pick(ITEMS), draft.pick(PACKS)
    size, full = draft.between(2, 9), draft.between(3, 30)
    total = size * full
    first = draft.between(1, total - 1)
    draft.words |= {"friend": friend.name, "items": items, "packs": packs, "s": size}
    draft.tell(
        ("{name} has {a} {items} and {friend} has {b}.", "{name} brings {a} {items}, {friend} brings {b}."),
        a=first,
        b=total - first,
    )
    draft.compute(
        (first, "+", total - first),
        ("together there are {e} {items}", "both have {e}", "they share {e} {items}", "we add: {e}"),
        "{name} has {a} and {friend} has {b}",
        a=first,
        b=total - first,
    )
    draft.tell(
        (
            "They fill {packs} with {s} {items} each.",
            "They pack {s} {items} into each of the {packs}.",
            "{s} {items} go into each of the {packs}.",
        )
    )
    draft.compute(
        (total, "/", size),
        (
            "that fills {e} {packs}",
            "they need {e} {packs}",
            "dividing gives {e}",
            "{e} {packs} get full",
            "the number of {packs} is {e}",
        ),
        "{s} {items} go into each of the {packs}",
    )
    if draft.chance(0.5):
        draft.tell(("How many {packs} do they fill?", "How many {packs} are needed?", "Find the number of {packs}."))
        return draft.finish(full)
    gone = draft.between(1, full - 1)
    draft.tell(("They sell {g} {packs}.", "{g} {packs} go to a neighbour.", "They give away {g} {packs}."), g=gone)
    draft.tell(("How many {packs} are left?", "How many {packs} do they keep?"))
    return draft.finish(
        draft.compute(
            (full, "-", gone),
            ("{e} {packs} are left", "they keep {e}", "minus {g} that is {e}", "there remain {e} {packs}"),
            "{g} {packs} go",
            g=gone,
        )
    )


def saving(draft: Draft) -> MathProblem:
    draft.people(1)
    start, rate, weeks = draft.between(5, 200), draft.between(3, 20), draft.between(2, 9)
    draft.words |= {"r": rate, "w": weeks}
    draft.tell(("{name} has ${n} in the bank.", "{name} starts saving with ${n}.", "{name}'s jar holds ${n}."), n=start)
    draft.tell(
        (
            "Every week {he} adds ${r}, for {w} weeks.",
            "{He} puts in ${r} a week for {w} weeks.",
            "For {w} weeks {he} saves ${r} each week.",
        )
    )
    draft.compute(
        (rate, "*", weeks),
        ("in {w} weeks {he} adds {e} dollars", "the weeks bring {e}", "{w} weeks of {r} are {e}", "{he} saves {e}"),
        "{name} saves {r} dollars a week",
    )
    total = start + rate * weeks
    draft.compute(
        (start, "+", rate * weeks),
        (
            "with the first money it is {e}",
            "the jar then holds {e}",
            "that makes {e} dollars",
            "adding the start gives {e}",
        ),
        "{name} had {n} dollars before",
        n=start,
    )
    if draft.chance(0.5):
        draft.tell(
            ("How much money does {he} have then?", "How many dollars are there now?", "What are {name}'s savings?")
        )
        return draft.finish(total)
    goal = total + draft.between(4, 99)
    draft.tell(("A bike costs ${g}.", "{He} wants a ${g} camera.", "The goal is ${g}."), g=goal)
    draft.tell(("How many dollars are missing?", "How much more does {he} need?"))
    return draft.finish(
        draft.compute(
            (goal, "-", total),
            ("{he} still needs {e}", "the missing part is {e} dollars", "{e} dollars are missing", "we subtract: {e}"),
            "the goal is {g} dollars",
            g=goal,
        )
    )


def seating(draft: Draft) -> MathProblem:
    room = draft.pick(("hall", "theater", "bus station", "tent", "class room", "garden"))
    rows, per_row, extra = draft.between(2, 12), draft.between(3, 9), draft.between(2, 30)
    thing = draft.pick(("seats", "chairs", "desks", "tables"))
    draft.words |= {"room": room, "thing": thing, "r": rows, "p": per_row}
    total = rows * per_row
    draft.tell(
        (
            "A {room} has {r} rows with {p} {thing} each.",
            "There are {r} rows of {p} {thing} in the {room}.",
            "In a {room} {r} rows hold {p} {thing} each.",
        )
    )
    draft.compute(
        (rows, "*", per_row),
        ("the rows hold {e} {thing}", "{r} rows make {e}", "there are {e} {thing} in rows", "{r} times {p} is {e}"),
        "{r} rows have {p} {thing} each",
    )
    if draft.chance(0.5):
        draft.tell(
            ("{x} {thing} more stand at the wall.", "Workers bring {x} more {thing}.", "Then {x} {thing} are added."),
            x=extra,
        )
        total = draft.compute(
            (total, "+", extra),
            ("with {x} more there are {e}", "that makes {e} {thing}", "adding {x} gives {e}", "the {room} now has {e}"),
            "{x} {thing} come",
            x=extra,
        )
    taken = draft.between(1, total - 1)
    draft.tell(("{t} {thing} are taken.", "People use {t} of them.", "{t} of the {thing} are broken."), t=taken)
    draft.tell(("How many {thing} are free to use?", "How many {thing} remain?", "Find the number of {thing} left."))
    return draft.finish(
        draft.compute(
            (total, "-", taken),
            (
                "{e} {thing} are free",
                "taking off {t} leaves {e}",
                "there remain {e}",
                "the free ones are {e}",
                "we subtract {t}: {e}",
            ),
            "{t} {thing} go",
            t=taken,
        )
    )


# How a lost round and a won one are told and worked, and what is given.
ROUNDS = {
    "-": (
        ("Round {i} costs {n} points.", "In round {i} {he} loses {n}.", "A mistake in round {i} takes {n} points."),
        (
            "round {i} drops it to {e}",
            "after round {i} there are {e}",
            "losing {n} leaves {e}",
            "the score falls to {e}",
        ),
        "round {i} takes {n} points",
    ),
    "+": (
        ("Round {i} gives {n} points.", "In round {i} {he} wins {n}.", "Round {i} adds {n}."),
        (
            "round {i} lifts it to {e}",
            "after round {i} there are {e}",
            "winning {n} makes {e}",
            "the score rises to {e}",
        ),
        "round {i} adds {n} points",
    ),
}


def scores(draft: Draft) -> MathProblem:
    draft.people(1)
    game = draft.pick(("a card game", "a quiz", "a ball game", "a board game"))
    draft.tell(("{name} plays {game}.", "{name} takes part in {game}.", "In {game} {name} collects points."), game=game)
    total = draft.between(5, 120)
    draft.tell(
        ("Round 1 gives {n} points.", "{He} opens with {n} points.", "The first round brings {n} points."), n=total
    )
    for i in range(2, draft.between(3, 5) + 1):
        n = draft.between(2, 60)
        sign = "-" if total > n + 3 and draft.chance(0.4) else "+"
        facts, lines, given = ROUNDS[sign]
        draft.tell(facts, i=i, n=n)
        total = draft.compute((total, sign, n), lines, given, i=i, n=n)
    draft.tell(("What is the score?", "How many points does {name} have?", "Find the final score."))
    return draft.finish(total)


FAMILIES: tuple[Callable[[Draft], MathProblem], ...] = (
    inventory, inventory, inventory, inventory, shopping, shopping, comparison, comparison, comparison, wages, wages,
    travel, reading, packing, saving, seating, scores,
)  # fmt: skip


MAX_SOLUTION_CHARACTERS = 400  # about 190 tokens: a solution has to fit the canvas


def make_math(rng: random.Random, plain: bool = False) -> MathProblem:
    while True:
        draft = Draft(rng, plain)
        problem = draft.pick(FAMILIES)(draft)
        if len(problem.answer) <= MAX_SOLUTION_CHARACTERS:
            return problem
