"""What is written to a pipe or a log file can be read there."""

import time

from kangaroo.utils.terminal import console, progress_bar


def test_bars_do_not_flood_a_file(capsys):
    for _ in progress_bar(range(30), desc="reading"):
        time.sleep(0.02)
    written = capsys.readouterr().err
    assert "reading: 100%" in written
    assert written.count("\r") <= 3  # its beginning and its end


def test_tables_are_wide_in_a_file(capsys):
    console().print("word " * 30)
    assert capsys.readouterr().out.count("\n") == 1
