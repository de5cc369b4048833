from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from sparsekv.bench.swarm.chunks import Usage
from sparsekv.bench.swarm.client import Answer
from sparsekv.bench.swarm.conversation import ChatConversation, TokenConversation, hash_token, pieces


def answered(text: str, input_tokens: int = 10, output_tokens: int = 5, **more: object) -> Answer:
    return Answer(status="ok", text=text, usage=Usage(input_tokens, output_tokens), **more)  # type: ignore[arg-type]


@given(st.lists(st.text(), max_size=5))
def test_the_body_is_the_conversation(texts: list[str]) -> None:
    """Any text survives: quotes, newlines, lone surrogates (as a question mark)."""
    conversation = ChatConversation("system")
    for text in texts:
        conversation.add_user(text)
        conversation.add_answer(answered(text))
    body = json.loads(conversation.body({"model": "m", "stream": True}))
    assert (body["model"], body["stream"]) == ("m", True)
    assert [m["content"] for m in body["messages"][1:]] == [t for text in texts for t in (text, text)]


def test_tool_calls_and_results_keep_their_order() -> None:
    conversation = ChatConversation("system")
    conversation.add_user("q")
    conversation.add_answer(answered("", tool_calls=[{"id": "c1", "name": "search", "arguments": '{"text": "x"}'}]))
    conversation.add_tool_result("c1", "found")
    messages = json.loads(conversation.body({}  | {"model": "m"}))["messages"]
    assert messages[2]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"text": "x"}'}
    assert messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "found"}


def test_counts_come_from_the_server() -> None:
    conversation = ChatConversation("s" * 40)
    conversation.add_user("u" * 60)
    conversation.add_answer(answered("a" * 20, input_tokens=25, output_tokens=5))
    conversation.count(answered("", input_tokens=25, output_tokens=5))
    assert conversation.context_tokens == conversation.reusable_tokens == 30
    assert conversation.chars_per_token == 4.0
    conversation.add_user("v" * 40)
    assert conversation.estimate() == 30 + 10 + 1


def test_reasoning_is_not_in_the_next_prompt() -> None:
    conversation = ChatConversation("s")
    conversation.count(answered("a", 25, 50, reasoning="hm"))
    assert conversation.context_tokens == 75
    assert conversation.reusable_tokens == 25


def test_rewinding() -> None:
    conversation = ChatConversation("system")
    conversation.count(answered("", 10, 2))
    mark, before = conversation.mark(), conversation.body({"model": "m"})
    conversation.new_parts()
    conversation.add_user("later")
    conversation.count(answered("", 20, 2))
    conversation.rewind(mark)
    assert conversation.body({"model": "m"}) == before
    assert conversation.context_tokens == conversation.reusable_tokens == 12
    conversation.add_user("again")
    assert [json.loads(part)["content"] for part in conversation.new_parts()] == ["again"]


@given(st.text())
def test_pieces_lose_nothing(text: str) -> None:
    assert "".join(pieces(text)) == text
    assert all(100 <= hash_token(piece, 1000) < 900 for piece in pieces(text))


def test_token_conversations_are_ids() -> None:
    conversation = TokenConversation("You answer.", 1000)
    conversation.add_user("def f(x): return x")
    conversation.add_answer(answered("", token_ids=[7, 8]))
    body = json.loads(conversation.body({"model": "m"}))
    assert body["prompt"][-2:] == [7, 8]
    assert body["return_token_ids"] is True
    assert len(body["prompt"]) == conversation.chars
