from __future__ import annotations

from nnsight_async.demo.display import heading, row


def test_a_row_is_one_line_whatever_the_token() -> None:
    assert row("\n", [" Paris", "\n"]) == "'\\n'                ' Paris'    '\\n'"


def test_columns_of_rows_and_heading_line_up() -> None:
    title = heading("Why?", 27).splitlines()[3]

    assert "top 3 after layer 27" in title
    assert title.index("top") == row(" is", [" is"]).index("' is'", 1)
