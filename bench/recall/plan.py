"""What a recall run asks: contexts of each cell, and their questions, alone or as the turns of one conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sparsekv.bench.recall.filler import Filler
from sparsekv.bench.recall.tasks import AGGREGATION, RETRIEVAL, TASKS, Context, Question, build, follow_ups
from sparsekv.profiles.errors import SparsekvError

CONVERSATION = "follow-up"
"""Kind of the cells in which the questions are turns of one conversation."""
MAX_ANSWER = {"function": 128, "variable": 64, "log": 64, "uuid": 40, "extract": 64}
"""Tokens that an answer may take; 24 where it is not said."""


@dataclass(frozen=True)
class RecallPlan:
    tasks: tuple[str, ...] = TASKS
    lengths: tuple[int, ...] = (4096,)
    """Tokens of a context, about."""
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    """Where the facts asked for lie; tasks whose answer is spread over the context are asked once for all depths."""
    contexts: int = 5
    """Contexts of each cell."""
    questions: int = 4
    """Questions about one context."""
    conversations: bool = True
    """Ask follow-ups too: the first question is a needle, the rest is of other kinds."""
    seed: int = 0

    def check(self, max_model_len: int) -> None:
        """Raises SparsekvError where a value cannot work."""
        if unknown := [task for task in self.tasks if task not in TASKS]:
            raise SparsekvError(f"no such task: {', '.join(unknown)}", hint=f"choose from: {', '.join(TASKS)}")
        if longest := [length for length in self.lengths if length + ROOM > max_model_len or length < 256]:
            raise SparsekvError(
                f"contexts of {longest[0]} tokens do not fit: at least 256, and {ROOM} less than the model's {max_model_len}",
                hint="give shorter ones with --length",
            )
        if wrong := [depth for depth in self.depths if not 0 <= depth <= 1]:
            raise SparsekvError(f"--depth {wrong[0]} is not between 0 and 1")


ROOM = 512
"""Tokens kept free beside a context: the chat template, earlier turns and the answer."""


@dataclass(frozen=True)
class Item:
    """One request: the turns before it (answered rightly, whatever the model said), the question, and what is right."""

    key: str
    cell: str
    """A task, or `CONVERSATION`."""
    task: str
    length: int
    depth: float | None
    """As asked for; None where the answer is spread."""
    turn: int
    context: Context
    question: Question
    before: tuple[Question, ...] = ()

    @property
    def max_tokens(self) -> int:
        return MAX_ANSWER.get(self.task, 24)

    def messages(self) -> list[dict[str, str]]:
        """The context stands at the start of the first user turn, so that every question shares it as a prefix."""
        turns = [*self.before, self.question]
        messages = []
        for index, question in enumerate(turns):
            text = f"{self.context.text}\n{question.text}" if index == 0 else question.text
            messages.append({"role": "user", "content": text})
            if index < len(turns) - 1:
                messages.append({"role": "assistant", "content": question.answer})
        return messages


def items(plan: RecallPlan, filler: Filler, count_tokens: Callable[[str], int]) -> Iterator[list[Item]]:
    """The requests about each context in turn, in the order in which they are sent; the same plan gives the same items."""
    for length in plan.lengths:
        for task in plan.tasks:
            spread = task in AGGREGATION
            for depth in (None,) if spread else plan.depths:
                for index in range(plan.contexts * (len(plan.depths) if spread else 1)):
                    seed = f"{plan.seed}:{task}:{length}:{depth}:{index}"
                    density = 0.0 if spread else 0.4
                    context = build([task], length - 64, plan.questions, seed, filler, count_tokens, density=density, depth=depth)
                    yield [
                        Item(f"{seed}:{number}", task, task, length, depth, 0, context, question)
                        for number, question in enumerate(context.questions)
                    ]
        if plan.conversations:
            yield from _conversations(plan, length, filler, count_tokens)


def _conversations(plan: RecallPlan, length: int, filler: Filler, count_tokens: Callable[[str], int]) -> Iterator[list[Item]]:
    kinds = [task for task in plan.tasks if task in RETRIEVAL]
    if len(kinds) < 2:
        return
    for index in range(plan.contexts * len(plan.depths)):
        seed = f"{plan.seed}:{CONVERSATION}:{length}:{index}"
        # A first question of each kind in turn; what is asked after it is of the other kinds.
        order: Sequence[str] = kinds[index % len(kinds) :] + kinds[: index % len(kinds)]
        built = build(order, length - 64, plan.questions + len(order), seed, filler, count_tokens, density=0.4)
        turns = follow_ups(built, order).questions[: plan.questions]
        yield [
            Item(f"{seed}:{turn}", CONVERSATION, question.task, length, None, turn, built, question, turns[:turn])
            for turn, question in enumerate(turns)
        ]
