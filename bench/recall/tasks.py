"""Recall tasks made from seeds: contexts full of look-alikes, and questions with exactly one right answer.

A context holds many *facts* of one or several kinds among filler text; a question asks for one of them, or for all that
share a property. Nothing here knows a model: lengths are counted by a function that the caller gives.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from sparsekv.bench.recall.filler import Filler
from sparsekv.bench.recall.words import ADJECTIVES, CITIES, NOUNS, VERBS


@dataclass(frozen=True)
class Question:
    task: str
    text: str
    answer: str
    depth: float
    """Where in the context the answer lies: 0 is its start, 1 its end; the mean where it lies in several places."""


@dataclass(frozen=True)
class Context:
    """A shared text, and questions to be asked about it alone or one after the other."""

    text: str
    questions: tuple[Question, ...]
    seed: str


@dataclass(frozen=True)
class Fact:
    """A block of text. A fact with parts is spread over the context, its parts in order."""

    parts: tuple[str, ...]
    question: str = ""
    answer: str = ""
    city: str = ""


@dataclass
class Names:
    """Hands out names, no two alike within a context."""

    rng: random.Random
    used: set[str] = field(default_factory=set)

    def unique(self, make: Callable[[], str]) -> str:
        for _ in range(1000):
            name = make()
            if name not in self.used:
                self.used.add(name)
                return name
        raise RuntimeError("names ran out: the context is too long for this kind of fact")

    def digits(self, count: int) -> str:
        return "".join(self.rng.choices("0123456789", k=count))

    def pick(self, *lists: Sequence[str]) -> str:
        return " ".join(self.rng.choice(words) for words in lists)


def needle(names: Names) -> Fact:
    """Many needles that differ in their key alone."""
    key = names.unique(lambda: names.pick(ADJECTIVES, NOUNS, NOUNS))
    code = names.digits(6)
    return Fact(
        (f"The access code of the {key} is {code}.\n",), f"What is the access code of the {key}? Answer with the number only.", code
    )


def uuid(names: Names) -> Fact:
    """Keys and values without meaning."""

    def identifier() -> str:
        return "-".join("".join(names.rng.choices("0123456789abcdef", k=4)) for _ in range(4))

    key, value = names.unique(identifier), identifier()
    return Fact((f'"{key}": "{value}",\n',), f'What is the value of the key "{key}"? Answer with the value only.', value)


def variable(names: Names) -> Fact:
    """An assignment that copies a name, and far before it the assignment of that name: two look-ups."""
    first, second = (names.unique(lambda: names.pick(VERBS, NOUNS).replace(" ", "_") + "_" + names.digits(2)) for _ in range(2))
    value = names.digits(5)
    return Fact(
        (f"{first} = {value}\n", f"{second} = {first}\n"),
        f"Which number does {second} hold? Write the chain of assignments and end with the number.",
        f"{second} = {first} = {value}",
    )


def function(names: Names) -> Fact:
    """Copies of one function, edited in a name and two constants."""
    name = "handler_" + names.unique(lambda: names.digits(4))
    body = (
        f"    if len(request.items) > {names.digits(4)}:\n"
        '        raise ValueError("too many items in request")\n'
        "    total = sum(item.price for item in request.items)\n"
        f"    return total + {names.digits(2)}"
    )
    question = f"Write out the body of the function {name} exactly, line by line, and nothing else."
    return Fact((f"def {name}(request):\n{body}\n\n",), question, body)


def log(names: Names) -> Fact:
    """Near-duplicate lines of a log."""
    rng, job = names.rng, names.unique(lambda: names.digits(5))
    state = rng.choice(("finished", "failed", "retried"))
    clock = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}:{rng.randrange(60):02d}"
    line = f"job {job}: {clock} worker-{rng.randrange(4)} {state} after {rng.randrange(100)} ms, {rng.randrange(10)} left"
    return Fact((line + "\n",), f"Write out the log line of job {job} exactly.", line)


RETRIEVAL: dict[str, Callable[[Names], Fact]] = {kind.__name__: kind for kind in (needle, uuid, variable, function, log)}
"""Tasks whose answer lies in one place (variable: in two)."""
AGGREGATION = ("extract", "count")
"""Tasks whose answer is spread over the context."""
TASKS = (*RETRIEVAL, *AGGREGATION)

MOST_RECORDS = 6


def records(names: Names, cities: int) -> list[Fact]:
    """One to `MOST_RECORDS` records of each of some cities."""
    return [
        Fact((f"Record: {city} has number {names.unique(lambda: names.digits(4))}.\n",), city=city)
        for city in names.rng.sample(CITIES, cities)
        for _ in range(names.rng.randint(1, MOST_RECORDS))
    ]


def build(
    tasks: Sequence[str],
    length: int,
    questions: int,
    seed: str,
    filler: Filler,
    count_tokens: Callable[[str], int],
    density: float = 0.5,
    depth: float | None = None,
) -> Context:
    """A context of about `length` tokens with facts for the `tasks`, and up to `questions` questions, tasks in turn.

    `density` is the share of the text that is facts, the rest being filler. With `depth`, questions about facts
    nearest to it come first. The same arguments give the same context.
    """
    rng = random.Random(seed)
    names = Names(rng)
    facts: dict[str, list[Fact]] = {task: [] for task in tasks if task in RETRIEVAL}
    scattered = records(names, min(len(CITIES), max(2, length // 256))) if set(tasks) & set(AGGREGATION) else []
    used = _tokens(scattered, count_tokens)
    while facts and used < length * density:
        for task, mine in facts.items():
            mine.append(RETRIEVAL[task](names))
            used += _tokens(mine[-1:], count_tokens)
    blocks = [fact for mine in facts.values() for fact in mine] + scattered
    for piece in filler.pieces(rng):
        if used >= length:
            break
        blocks.append(Fact((piece,)))
        used += count_tokens(piece)
    text, places = _scatter(blocks, rng)
    pools = {task: [Question(task, fact.question, fact.answer, places[fact][-1]) for fact in mine] for task, mine in facts.items()}
    pools |= {task: _aggregate(task, places) for task in tasks if task in AGGREGATION}
    for pool in pools.values():
        rng.shuffle(pool)
        if depth is not None:
            pool.sort(key=lambda question: abs(question.depth - depth))
    rounds = -(-questions // len(tasks))
    chosen = [pools[task][index] for index in range(rounds) for task in tasks if index < len(pools[task])]
    return Context(text, tuple(chosen[:questions]), seed)


def _tokens(facts: Iterable[Fact], count_tokens: Callable[[str], int]) -> int:
    return sum(count_tokens(part) for fact in facts for part in fact.parts)


def _scatter(blocks: list[Fact], rng: random.Random) -> tuple[str, dict[Fact, list[float]]]:
    """The text, and where in it each fact's parts begin (0 to 1), facts in order of their last part."""
    slots = [slot for block in blocks for slot in zip(sorted(rng.random() for _ in block.parts), block.parts, [block] * 9, strict=False)]
    slots.sort(key=lambda slot: slot[0])
    text = "".join(part for _, part, _ in slots)
    places: dict[Fact, list[float]] = {}
    at = 0
    for _, part, block in slots:
        places.setdefault(block, []).append(at / max(1, len(text)))
        at += len(part)
    return text, dict(sorted(places.items(), key=lambda item: item[1][-1]))


def _aggregate(task: str, places: dict[Fact, list[float]]) -> list[Question]:
    by_city: dict[str, list[Fact]] = {}
    for fact in places:
        if fact.city:
            by_city.setdefault(fact.city, []).append(fact)
    questions = []
    for city, mine in by_city.items():
        depth = sum(places[fact][0] for fact in mine) / len(mine)
        if task == "extract":
            text = f"List the numbers of all records of {city}, in the order in which they appear."
            answer = " ".join(fact.parts[0].rsplit(" ", 1)[1].rstrip(".\n") for fact in mine)
        else:
            text, answer = f"How many records of {city} are there? Answer with a number only.", str(len(mine))
        questions.append(Question(task, text, answer, depth))
    return questions


def follow_ups(context: Context, kinds: Sequence[str]) -> Context:
    """The same context with its questions ordered so that the first is of one kind and the rest of the others."""
    first = [question for question in context.questions if question.task == kinds[0]][:1]
    rest = [question for question in context.questions if question.task != kinds[0]]
    return replace(context, questions=(*first, *rest))
