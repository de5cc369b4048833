"""Endless training sequences: a context full of facts, then as many turns of question and answer as fit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sparsekv.bench.recall.filler import Filler
from sparsekv.bench.recall.tasks import RETRIEVAL, TASKS, build
from sparsekv.bench.recall_model.tokenizer import END, FOLDER, TURN, TURN_END

CONTEXT_WEIGHT = 0.03
"""Loss weight of context and questions: enough to learn what text looks like, too little to learn random digits by heart."""

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def length_weights(progress: float) -> list[float]:
    """How often each of `LENGTHS` is drawn at a share of the whole training: short ones first, long ones to the end."""
    stages = (
        (0.00, (6, 2, 0, 0, 0, 0, 0)),
        (0.12, (2, 4, 2, 1, 0, 0, 0)),
        (0.30, (1, 2, 3, 3, 1, 0, 0)),
        (0.55, (0, 1, 2, 3, 3, 1, 0)),
        (0.75, (0, 1, 1, 2, 4, 2, 1)),
        (0.88, (0, 0, 1, 2, 3, 3, 2)),
    )
    return list(next(weights for start, weights in reversed(stages) if progress >= start))


@dataclass(frozen=True)
class Turns:
    """Token ids of a sequence and, for each, how much its prediction counts."""

    tokens: np.ndarray
    weights: np.ndarray


class Encoder:
    """The recall model's tokenizer and chat format."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self.end, self.turn, self.turn_end = (self._tokenizer.token_to_id(token) for token in (END, TURN, TURN_END))
        self.newline = self("\n")[0]
        self.user, self.assistant = [self.turn, *self("user\n")], [self.turn, *self("assistant\n")]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def count(self, text: str) -> int:
        return len(self(text))

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def prompt_start(context: str, question: str) -> str:
    """The first user turn: everything that is asked later shares it."""
    return f"{context}\n{question}"


def sequence(length: int, rng: random.Random, filler: Filler, encode: Encoder) -> Turns:
    """One training sequence of exactly `length` tokens."""
    tasks = rng.sample(TASKS, rng.choice((1, 1, 2, 3, len(TASKS))))
    room = int(length * rng.uniform(0.45, 0.85))
    context = build(
        tasks, room - 8, max(4, length // 24), f"train:{rng.getrandbits(64)}", filler, encode.count, density=rng.uniform(0.2, 1.0)
    )
    tokens = [*encode.user, *encode(context.text), encode.newline]
    weights = [CONTEXT_WEIGHT] * len(tokens)
    for index, question in enumerate(context.questions):
        asked = [*([] if index == 0 else encode.user), *encode(question.text), encode.turn_end, encode.newline, *encode.assistant]
        answer = [*encode(question.answer), encode.turn_end]
        if len(tokens) + len(asked) + len(answer) + 1 > length:
            break
        tokens += [*asked, *answer, encode.newline]
        weights += [CONTEXT_WEIGHT] * len(asked) + [1.0] * len(answer) + [0.0]
    padding = length - len(tokens)
    tokens, weights = (tokens + [encode.end] * padding)[:length], (weights + [0.0] * padding)[:length]
    return Turns(np.array(tokens, dtype=np.int16), np.array(weights, dtype=np.float16))


def batches(tokens_per_batch: int, seed: str, progress: Callable[[], float]) -> Iterator[Turns]:
    """Batches `[tokens_per_batch / length, length]` of one length each, by the curriculum."""
    rng = random.Random(seed)
    filler, encode = Filler.bundled("fit"), Encoder()
    while True:
        length = rng.choices(LENGTHS, length_weights(progress()))[0]
        length = min(length, tokens_per_batch)
        rows = [sequence(length, rng, filler, encode) for _ in range(tokens_per_batch // length)]
        yield Turns(np.stack([row.tokens for row in rows]), np.stack([row.weights for row in rows]))


def evaluation(task: str, length: int, index: int, filler: Filler, encode: Encoder, questions: int = 4) -> Iterator[Turns]:
    """Prompts of about `length` tokens with one question each, weight 1 on the answer; text and seeds training never sees."""
    density = 0.5 if task in RETRIEVAL else 0.0
    context = build([task], length - 80, questions, f"evaluation:{task}:{length}:{index}", filler, encode.count, density=density)
    prefix = [*encode.user, *encode(context.text), encode.newline]
    for question in context.questions:
        asked = [*prefix, *encode(question.text), encode.turn_end, encode.newline, *encode.assistant]
        answer = [*encode(question.answer), encode.turn_end]
        yield Turns(np.array(asked + answer, dtype=np.int16), np.array([0.0] * len(asked) + [1.0] * len(answer), dtype=np.float16))
