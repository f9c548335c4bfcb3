from __future__ import annotations

import copy
import pickle

import pytest

from nnsight_async import Token


def test_a_token_is_a_value() -> None:
    token = Token(7, " word", 2, saves={"x": 1}, finish_reason="stop")
    assert (token.logprob, token.invoke, token.sequence, token.dropped) == (None, 0, 0, False)
    assert token == Token(id=7, text=" word", index=2, logprob=None, saves={"x": 1}, finish_reason="stop")
    assert token != Token(7, " word", 3, saves={"x": 1}, finish_reason="stop")
    assert copy.deepcopy(token) == token == pickle.loads(pickle.dumps(token))
    assert repr(token).startswith("Token(id=7, text=' word', index=2, logprob=None, saves={'x': 1}")
    with pytest.raises(AttributeError):
        token.id = 8  # type: ignore[misc]
    match token:
        case Token(id, text, index):
            assert (id, text, index) == (7, " word", 2)


def test_tokens_share_no_values() -> None:
    one, other = Token(7, "", 0), Token(8, "", 1)
    one.saves["x"] = 1
    assert other.saves == {}
