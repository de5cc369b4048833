"""One agent: fills its context with code, asks about it turn after turn, and never changes anything."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from .client import Answer
from .conversation import ChatConversation, Conversation, Mark, TokenConversation
from .options import PromptForm, SwarmOptions
from .recall import Fact, make_facts, plant
from .repository import Repository
from .script import Script
from .sender import AgentFailed, AgentView, Sender
from .tools import Tools

TOOL_ROUNDS = 4
TOOL_CALL_TOKENS = 256
OVERHEAD = 48
"""Tokens of a question and of the marks around a message."""


@dataclass
class _Planted:
    fact: Fact
    position: int
    """Tokens of context after which it is due."""
    done: bool = False


class Agent:
    """Holds one conversation. With `by_model` the model's own tool calls are carried out, and what they leave of a turn's
    reading is read by the script; without, the script reads everything. The tokens that a turn adds are the same."""

    def __init__(self, index: int, sender: Sender, repository: Repository, options: SwarmOptions, preamble: str, *, by_model: bool) -> None:
        self.view = AgentView(index)
        self.script = Script(repository, options.seed, index)
        self.view.role = self.script.role
        self._tools = Tools(repository)
        self._sender, self._options, self._by_model = sender, options, by_model
        system = f"{preamble}\nYou are {self.script.role}. You are agent {index}."
        self.conversation: Conversation = (
            ChatConversation(system) if options.prompt is PromptForm.CHAT else TokenConversation(system, options.vocabulary)
        )
        facts = make_facts(options.facts, options.seed, index) if options.check_recall else []
        span = options.context * 0.85
        self._facts = [_Planted(fact, int(span * (i + 0.5) / len(facts))) for i, fact in enumerate(facts)]
        self._owed = 0
        """Tokens of reading that the model left of its turns."""
        self._filled: Mark | None = None
        self.rewinds = 0

    async def fill(self) -> None:
        """Reads until the context has its size."""
        while (room := self._options.context - self.conversation.estimate()) > OVERHEAD + 16:
            answer_tokens = min(self._options.fill_answer_tokens, max(1, room // 4))
            reading = min(self._options.reading, room - answer_tokens - OVERHEAD)
            await self._turn("read", max(0, reading), answer_tokens)
            if self._options.context - self.conversation.context_tokens < OVERHEAD + 64:
                break
        self._filled = self.conversation.mark()

    async def follow_up(self, number: int) -> None:
        """A new question about what is already there, and, where facts are planted, one for a fact."""
        self._make_room(self._options.answer_tokens)
        await self._turn("", self._options.follow_up_tokens, self._options.answer_tokens)
        due = [p for p in self._facts if p.done][number :: max(1, self._options.turns)]
        for planted in due:
            self._make_room(self._options.answer_tokens)
            await self._recall(planted.fact)

    async def decode(self) -> None:
        """One long answer."""
        self._make_room(self._options.decode_tokens)
        await self._turn("", 0, self._options.decode_tokens)

    def load(self, tokens: int, text_per_token: float) -> None:
        """Makes the next prompt about `tokens` long at once, as an intruder does."""
        self.conversation.add_user(self.script.read(int((tokens - self.conversation.estimate()) * text_per_token)))

    async def intrude(self, answer_tokens: int) -> None:
        """Sends what was loaded."""
        await self._ask("intrude", answer_tokens)

    def reset(self) -> None:
        """Back to the filled context, whatever came after."""
        if self._filled is not None:
            self.conversation.rewind(self._filled)

    def _make_room(self, answer_tokens: int) -> None:
        """Goes back to the filled context when the next turn would outgrow a quarter more than it, or the server."""
        room = max(self._options.peak, self._options.context * 5 // 4)
        if self._sender.server.max_model_len is not None:
            room = min(room, self._sender.server.max_model_len)
        if self.conversation.estimate() + self._options.follow_up_tokens + OVERHEAD + answer_tokens > room:
            self.rewinds += 1
            self.reset()

    async def _turn(self, kind: str, reading: int, answer_tokens: int) -> None:
        self.view.turn += 1
        asked, question = self.script.question()
        owed, self._owed = self._owed, 0
        tokens = owed if self._by_model else reading
        text = f"{self._read(tokens)}\n\n{question}" if tokens > 0 else question
        self.conversation.add_user(text)
        answer = await self._ask(kind or asked, max(answer_tokens, TOOL_CALL_TOKENS) if self._by_model and reading else answer_tokens)
        if self._by_model:
            await self._run_tools(answer, kind or asked, reading, answer_tokens)

    async def _run_tools(self, answer: Answer, kind: str, reading: int, answer_tokens: int) -> None:
        """Carries out tool calls, round after round, within the turn's reading; the rest of it is owed to the next turn."""
        left = reading
        for _ in range(TOOL_ROUNDS):
            if not answer.tool_calls or not isinstance(self.conversation, ChatConversation):
                break
            self.view.state = "tool"
            began = time.perf_counter()
            for call in answer.tool_calls:
                result = await asyncio.to_thread(self._tools.run, call["name"], call["arguments"])
                allowed = int(max(left, 32) * self.conversation.text_per_token)
                result = self._with_facts(result[:allowed])
                self.conversation.add_tool_result(call["id"], result)
                left -= int(len(result) / self.conversation.text_per_token)
            answer = await self._ask(kind, answer_tokens, tool_seconds=time.perf_counter() - began)
        self._owed += max(0, left)
        if answer.tool_calls and isinstance(self.conversation, ChatConversation):
            for call in answer.tool_calls:
                self.conversation.add_tool_result(call["id"], "error: no more tool calls in this turn; answer from what you have read")

    async def _recall(self, fact: Fact) -> None:
        self.view.turn += 1
        self.conversation.add_user(fact.question)

        def score(answer: Answer) -> bool | None:
            if not answer.text.strip() and answer.finish_reason == "length":
                return None  # still thinking when its tokens ran out: says nothing about recall
            return fact.answered_by(answer.text)

        answer = await self._sender.ask(
            self.view, self.conversation, "recall", max(64, self._options.answer_tokens), tools=self._by_model, score=score
        )
        self._take(answer)

    async def _ask(self, kind: str, max_tokens: int, tool_seconds: float = 0.0) -> Answer:
        answer = await self._sender.ask(
            self.view,
            self.conversation,
            kind,
            max_tokens,
            tools=self._by_model,
            ignore_eos=self._options.ignore_eos and not self._by_model,  # a tool call must be able to end
            tool_seconds=tool_seconds,
        )
        self._take(answer)
        return answer

    def _take(self, answer: Answer) -> None:
        self.conversation.add_answer(answer)
        self.conversation.count(answer)
        self.view.context = self.conversation.context_tokens
        limit = self._sender.server.max_model_len
        if limit is not None and self.view.context > limit:
            raise AgentFailed(f"the context came to {self.view.context} tokens of {limit}")

    def _read(self, tokens: int) -> str:
        return self._with_facts(self.script.read(int(tokens * self.conversation.text_per_token)))

    def _with_facts(self, text: str) -> str:
        """Plants the facts that are due somewhere in `text`."""
        start = self.conversation.estimate()
        length = max(1, int(len(text) / self.conversation.text_per_token))
        for planted in self._facts:
            if not planted.done and self._filled is None and planted.position < start + length:
                text = plant(text, planted.fact, min(1.0, max(0.0, (planted.position - start) / length)))
                planted.done = True
        return text
