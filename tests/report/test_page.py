"""The page shows what the folder says, fetches nothing, runs nothing that a file says, and never fails."""

import json
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from colonnade.errors import ConfigError
from colonnade.report import gantt, write
from colonnade.report.charts import final
from colonnade.report.happened import MOST_ROWS, details, listed, steps_of
from colonnade.report.page import page, state_of
from colonnade.report.record import read_run
from colonnade.report.watch import watch
from colonnade.report.write import write_report
from tests.commands import here
from tests.report import written

VOID = {"meta", "input", "img", "br"}
EVIL = "<script>alert(1)</script>\"'&"


class Reader(HTMLParser):
    """Fails where tags do not close in order; keeps what a browser would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] == ["script"] else self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def shown(*folders: Path) -> Reader:
    return Reader(page([read_run(folder) for folder in folders]))


def test_everything_is_there(tmp_path: Path) -> None:
    text = shown(written.run(tmp_path / "r")).text
    for words in (
        "finished", "11.25k parameters", "Loss", "validation", "Throughput", "MFU", "Learning rate", "Gradient norm",
        "attention logits", "gradients", "updates", "Memory of a rank, predicted 6 GB", "7.5 GB 1.25", "0.83",
        "A profiled step steps 5 to 6", "F0", "Where a step goes", "rank lost", "rank 3", "a note of the run",
        "optim.learning_rate: 0.001 -> 0.0005", "model.num_layers 4",
    ):  # fmt: skip
        assert words in text, words


def test_a_map_of_colours_says_what_its_ends_are(tmp_path: Path) -> None:
    """What the page's script reads numbers by: ends of the scale, first and last step, and units."""
    read = shown(written.run(tmp_path / "r"))
    names = ("data-low", "data-high", "data-first", "data-last", "data-rows")
    columns = [[value for _, name, value in read.attributes if name == each] for each in names]
    units = "\n".join(f"blocks.{layer}" for layer in range(4))
    ends = (("3", "42"), ("0.25", "1"), ("0.001", "0.004"))  # attention logits, gradients, updates
    assert [*zip(*columns, strict=True)] == [(*each, "1", "39", units) for each in ends]


def test_kinds_of_memory_that_take_nothing_are_not_in_the_bar(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r")
    kinds = {"parameters": 2e9, "buffers": 0, "optimizer": 4e9}
    (folder / "prediction.json").write_text(json.dumps({"memory": {"by_kind": kinds}}))
    (folder / "comparison.json").unlink()
    text = shown(folder).text
    assert "parameters" in text and "optimizer" in text and "buffers" not in text


def test_what_a_rank_waits_for_is_grey_beside_the_colours_of_its_work(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r")
    parts = {"forward": 0.5, "wait for tp": 0.3, "backward": 1.0, "wait for dp": 0.1, "rest": 0.1}
    (folder / "profile.json").write_text(json.dumps({"ranks": [{"name": "rank 0", "parts": parts}]}))
    legend = page([read_run(folder)]).split("Where a step goes")[1].split("</figcaption>")[0]
    assert re.findall(r'class="key (\w+)"></i>([\w ]+)<', legend) == [
        ("p0", "forward"), ("p1", "backward"), ("w0", "wait for tp"), ("w1", "wait for dp"), ("rest", "rest"),
    ]  # fmt: skip


@pytest.mark.parametrize(("most", "drawn"), [(1, ["F0"]), (2, ["F0", "B0"]), (3, ["F0", "B0"])])
def test_a_profiled_step_says_which_actions_are_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, drawn: list[str]
) -> None:
    monkeypatch.setattr(gantt, "MOST_ACTIONS", most)
    picture = page([read_run(written.run(tmp_path / "r"))]).split("<b>Step 5</b>")[1].split("</figure>")[0]
    assert [name for name in ("F0", "B0") if f">{name}<" in picture] == drawn
    assert (f"The first {most} actions alone are drawn." in picture) == (len(drawn) < 2)


def test_all_rows_of_a_profiled_step_share_one_limit_of_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gantt, "MOST_ACTIONS", 3)
    kinds = [{"kind": "F", "microbatch": n, "chunk": 0, "start": 1.0 * n, "end": n + 1.0} for n in range(2)]
    rows = [{"name": f"stage {n}", "actions": kinds} for n in range(3)]
    text = gantt.drawn({"gantt": {"seconds": 4.0, "rows": rows}})
    drawn = [re.findall("<b style=", part) for part in re.split(r"stage \d<", text)[1:]]
    assert list(map(len, drawn)) == [2, 1, 0]
    assert "The first 3 actions alone are drawn." in text


def test_a_profiled_action_is_named_by_its_micro_batch_and_its_chunk_of_several() -> None:
    """The optimizer's step is told by its colour."""
    about = ({"kind": "F", "microbatch": 0, "chunk": 0}, {"kind": "B", "microbatch": 3, "chunk": 2},
             {"kind": "W", "microbatch": 1}, {"kind": "optimizer"})  # fmt: skip
    actions = [{**each, "start": 1.0 * number, "end": number + 1.0} for number, each in enumerate(about)]
    text = gantt.drawn({"gantt": {"seconds": 4.0, "rows": [{"name": "stage 0", "actions": actions}]}})
    assert re.findall("<b style=.*?>(.*?)</b>", text) == ["F0", "B3.2", "W1"]


def test_compute_by_unit_has_a_column_for_each_kind_that_some_unit_has() -> None:
    units = {"embedding": {"F": 0.1}, "block 0": {"F": 0.2, "B": 0.4}}
    text = gantt.drawn({"ranks": [{"name": "rank 0", "parts": {"F": 0.3}, "units": units}]}).split("by unit")[1]
    assert [re.sub("<.*?>", "", cell) for cell in re.findall("<th.*?</th>", text)] == ["unit", "F", "B"]
    rows = [[re.sub("<.*?>", "", cell) for cell in row.split("</td>")[:-1]] for row in text.split("<tr>")[2:]]
    assert rows == [["embedding", "100 ms", ""], ["block 0", "200 ms", "400 ms"]]


def test_what_befell_a_run_is_marked_in_every_chart(tmp_path: Path) -> None:
    """By its kind; what is of minor interest stands below the first chart alone."""
    text = page([read_run(written.run(tmp_path / "r"))])
    charts = [figure for figure in re.findall(r'<figure class="chart.*?</figure>', text) if "<svg" in figure]
    assert len(charts) >= 5
    for chart in charts:
        plots = re.findall(r"<svg.*?</svg>", chart)
        for plot in plots:
            assert re.findall(r'class="mark ([a-z-]+)"', plot) == ["trouble", "resumed"], plot


def test_the_page_loads_nothing_and_says_so_to_the_browser(tmp_path: Path) -> None:
    read = shown(written.run(tmp_path / "r"))
    policy = [value for tag, name, value in read.attributes if tag == "meta" and "default-src" in (value or "")]
    assert policy and policy[0] is not None and policy[0].startswith("default-src 'none'")
    loads = [
        (tag, value) for tag, name, value in read.attributes if name in ("src", "href", "action", "srcset", "data")
    ]
    assert all(tag == "img" and (value or "").startswith("data:image/png;base64,") for tag, value in loads)
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import", (Path(__file__).parents[2] / "src/colonnade/drawing/page.css").read_text())


def test_what_files_say_is_text_and_credentials_are_hidden(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r<i>")
    more = [
        {"event": EVIL, "time": 1250.0, "step": 5, EVIL: EVIL},
        {"event": "saved", "step": 6, "where": "s3://me:topsecret@bucket/?key=alsosecret"},
        {"event": "setup", "layout": EVIL, "notes": [EVIL]},
    ]
    with (folder / "events.jsonl").open("a") as file:
        file.write(written.lines(more))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(written.lines([{"step": 41, "loss": 1.0, EVIL: 1.0}]))
    (folder / "profile.json").write_text(json.dumps(written.PROFILE).replace("stage 0", "stage <script>"))
    (folder / "thermometers.jsonl").write_text(
        written.lines(
            [{"step": s, "updates": {EVIL: 1.0 * s}, "activations": {"u": {EVIL: {EVIL: s}}}} for s in (1, 2)]
        )
    )
    text = page([read_run(folder)])
    read = Reader(text)
    assert (
        text.count("<script")
        == text.count("</script>")
        == len([1 for script in read.scripts if script.lstrip().startswith(("{", '"use strict"'))])
    )
    assert "alert(1)" in read.text and "<i>" in read.text
    assert "topsecret" not in text and "alsosecret" not in text


@pytest.mark.parametrize("goes_on", ["started", "resumed", "rolled back"])
def test_a_run_that_goes_on_is_not_shown_as_it_ended_before(goes_on: str, tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=3)
    for event, state in (("interrupted", "interrupted"), (goes_on, "running")):
        with (folder / "events.jsonl").open("a") as file:
            file.write(written.lines([{"event": event, "time": 1400.0}]))
        assert state_of(read_run(folder)) == state


@pytest.mark.parametrize(
    ("more", "state"),
    [
        (["fault", "restart", "resumed"], "running"),
        (["fault", "no restart"], "no-restart"),
        (["fault", "no restart", "resumed"], "running"),
        (["interrupted", "no restart"], "interrupted"),
        (["roll_back"], "running"),
        (["roll_back", "rolled back"], "running"),
        (["roll_back", "no rollback", "fault", "no restart"], "diverged"),
        (["stop", "fault", "no restart"], "diverged"),
        (["stopped early", "saved", "finished"], "stopped-early"),
        (["stopped early", "finished", "resumed", "finished"], "finished"),
        (["stopped early", "returns to step 4", "saved"], "running"),
        (["stopped early", "goes on with the majority's state"], "stopped-early"),
    ],
)
def test_a_run_has_ended_when_nothing_starts_it_again(more: list[str], state: str, tmp_path: Path) -> None:
    """One that returns to a checkpoint by itself has not; `report --live` and `watch` wait for what comes."""
    folder = written.run(tmp_path / "r", steps=3)
    told = [{"event": "started"}, *({"event": each, "time": 1400.0} for each in more)]
    for each in told:
        if each["event"] in ("roll_back", "stop"):
            each |= {"event": "diverged", "then": each["event"]}
        if each["event"].startswith(("returns", "goes on")):
            each |= {"event": "copies differ", "then": each["event"]}
    (folder / "events.jsonl").write_text(written.lines(told))
    assert state_of(read_run(folder)) == state
    terminal = StringIO()
    watch(folder, every=1, once=True, console=Console(file=terminal, width=100))
    assert ("ended by a fault" in terminal.getvalue()) == (state == "no-restart")


def test_several_runs_stand_beside_each_other_with_what_differs(tmp_path: Path) -> None:
    first, second = written.run(tmp_path / "first"), written.run(tmp_path / "second", steps=20)
    text = shown(first, second).text
    assert "2 runs" in text and "Validation loss" in text
    assert "train.steps 40 20" in text


def test_runs_differ_in_what_was_changed_on_the_way(tmp_path: Path) -> None:
    """Also where they began alike, or were alike at their end."""
    changed = {"event": "changed", "step": 7, "changed": ["optim.learning_rate: 0.0003 -> 0.001"]}
    first, second = written.run(tmp_path / "first"), written.run(tmp_path / "second")
    for folder, event in ((first, []), (second, [changed, changed])):
        (folder / "events.jsonl").write_text(written.lines([{"event": "started"}, *event]))
    assert "optim.learning_rate 0.0003 0.0003 -> 0.001 behind step 7" in shown(first, second).text
    config = (first / "config.toml").read_text()
    (first / "config.toml").write_text(config.replace("3e-4", "1e-3"))
    assert "optim.learning_rate 0.001 0.0003 -> 0.001 behind step 7" in shown(first, second).text


def test_a_key_that_one_run_alone_has_differs(tmp_path: Path) -> None:
    first, second = written.run(tmp_path / "first"), written.run(tmp_path / "second")
    config = second / "config.toml"
    config.write_text(config.read_text().replace("[optim]", "[optim]\nbeta2 = 0.99"))
    for runs in ((first, second), (second, first)):
        assert "What differs key" in shown(*runs).text and "optim.beta2" in shown(*runs).text.split("What differs")[1]


def test_the_last_throughput_is_that_of_the_last_steps(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=200)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line |= {"tokens_per_second": 100.0, "mfu": 0.1} if number < 100 else {"tokens_per_second": 900.0, "mfu": 0.3}
    (folder / "metrics.jsonl").write_text(written.lines(lines))
    found = final(read_run(folder))
    assert (found["tokens_per_second"], found["mfu"], found["tokens"]) == (900.0, 0.3, 200_000)


def test_a_long_run_is_a_small_page_that_says_what_a_point_is(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=20_000)
    text = page([read_run(folder)])
    assert len(text) < 1_000_000
    assert "A point of a line is the mean of up to 50 steps" in text


def test_an_event_without_a_step_stands_between_those_around_it() -> None:
    events = [
        {"event": "started", "time": 100.0},
        {"event": "saved", "time": 200.0, "step": 10},
        {"event": "rank lost", "time": 250.0},
        {"event": "saved", "time": 300.0, "step": 20},
        {"event": "rolled back", "time": 310.0, "to": 12},
    ]
    assert steps_of(events) == [0.0, 10.0, 15.0, 20.0, 12.0]
    early = [("started", None, 100.0), ("rank lost", None, 150.0), ("saved", 10, 200.0)]
    assert steps_of([{"event": name, "step": step, "time": time} for name, step, time in early]) == [0.0, 5.0, 10.0]
    assert steps_of([{"event": "odd", "time": None}])[0] != 0.0


def test_what_an_event_says_may_be_zero_or_false() -> None:
    """What is empty is left out."""
    about = {"rank": 0, "seconds": 0.0, "again": False, "reason": "", "notes": [], "where": {}, "by": None}
    assert details({"event": "rank lost", "time": 5.0, "step": 7, **about}) == "rank 0, seconds 0, again false"


@pytest.mark.parametrize("more", [0, 1234])
def test_of_many_events_the_newest_are_listed_and_that_is_said(tmp_path: Path, more: int) -> None:
    folder = written.run(tmp_path / "r")
    events = [{"event": "saved", "time": 1e9 + step, "step": step} for step in range(1, MOST_ROWS + more + 1)]
    (folder / "events.jsonl").write_text(written.lines(events))
    found = listed(read_run(folder))
    steps = [int(each.replace(",", "")) for each in re.findall(r"<td[^>]*>([\d,]+)</td>", found)]
    assert steps == list(range(MOST_ROWS + more, more, -1))
    notes = re.findall(r"<p.*?>(.*?)</p>", found)
    assert notes == ["1,234 older ones are left out; they are in events.jsonl."] * bool(more)


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "events.jsonl",
        "thermometers.jsonl",
        "prediction.json",
        "comparison.json",
        "profile.json",
        "config.toml",
    ],
)
def test_any_file_may_be_missing_or_empty(tmp_path: Path, name: str) -> None:
    folder = written.run(tmp_path / "r", steps=3)
    (folder / name).write_text("")
    assert folder.name in shown(folder).text.split()
    (folder / name).unlink()
    assert folder.name in shown(folder).text.split()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["step", "event", "time", "loss", "activations", "gradients", "updates", "memory", "by_kind", "predicted",
             "measured", "gantt", "ranks", "rows", "actions", "kind", "start", "end", "seconds", "parts", "units",
             "steps", "to", "changed", "notes", "blocks.0", "rms"]
        ),
        inner,
        max_size=5,
    ),
    max_leaves=25,
)  # fmt: skip


FILES = ["metrics.jsonl", "events.jsonl", "thermometers.jsonl", "prediction.json", "comparison.json", "profile.json"]


@pytest.mark.slow
@given(content=st.lists(json_values, max_size=4), name=st.sampled_from(FILES))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_no_content_makes_it_fail(tmp_path_factory: pytest.TempPathFactory, content: list[object], name: str) -> None:
    folder = written.run(tmp_path_factory.mktemp("any") / "r", steps=2)
    text = "".join(json.dumps(each) + "\n" for each in content)
    if name.endswith(".json"):
        whole = {"ranks": content, "gantt": {"seconds": 1.0, "rows": content}, "memory": content, "steps": content}
        text = json.dumps(content[0] if content and isinstance(content[0], dict) else whole)
    (folder / name).write_text(text)
    shown(folder)
    watch(folder, every=1, once=True, console=Console(file=StringIO(), width=80))


def test_the_command_writes_beside_the_run_and_refuses_what_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written.run(tmp_path / "r", steps=3)
    write_report([folder], None)
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert "report.html: " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="is a folder"):
        write_report([folder], tmp_path)
    with pytest.raises(ConfigError, match="17 runs are more"):
        write_report([folder] * 17, None)
    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"--output .*metrics\.jsonl: what is written is \.html or \.htm"):
        write_report([folder], folder / "metrics.jsonl")
    assert (folder / "metrics.jsonl").read_text() == before


def test_the_command_writes_once_where_nobody_asks_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(write, "write_report", lambda runs, output, live, task: told.append(live))
    assert here("report", tmp_path).status == 0 and here("report", tmp_path, "--live", 3).status == 0
    assert told == [0, 3]


def test_a_page_is_read_again_while_the_run_is_under_way(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=3)
    assert 'http-equiv="refresh"' not in page([read_run(folder)])
    assert '<meta http-equiv="refresh" content="7">' in page([read_run(folder)], refresh=7)


def under_way(folder: Path) -> Path:
    """A run that has done 40 of 100 steps, of two seconds each."""
    written.run(folder)
    (folder / "config.toml").write_text(written.CONFIG.format(steps=100))
    (folder / "events.jsonl").write_text(written.lines(written.events(40)[:-1]))
    return folder


def test_a_run_under_way_tells_how_long_it_still_takes(tmp_path: Path) -> None:
    folder, terminal = under_way(tmp_path / "r"), StringIO()
    assert "2 min 00 s left" in shown(folder).text
    watch(folder, every=1, once=True, console=Console(file=terminal, width=100))
    assert "40 of 100" in terminal.getvalue() and "2 min 00 s" in terminal.getvalue()
    with (folder / "events.jsonl").open("a") as file:
        file.write(written.lines([{"event": "stopped early", "time": 1400.0}, {"event": "finished", "time": 1400.0}]))
    watch(folder, every=1, once=True, console=Console(file=(ended := StringIO()), width=100))
    assert "40 of 100" in ended.getvalue() and "2 min" not in ended.getvalue() + shown(folder).text


def test_what_is_left_takes_as_long_as_the_last_50_steps(tmp_path: Path) -> None:
    folder = under_way(tmp_path / "r")
    slower = [{**line, "seconds": 10.0 if line["step"] <= 10 else 3.0} for line in written.metrics(60)]
    (folder / "metrics.jsonl").write_text(written.lines(slower))
    assert "2 min 00 s left" in shown(folder).text, "40 steps of 3 seconds"
    watch(folder, every=1, once=True, console=Console(file=(terminal := StringIO()), width=100))
    assert "60 of 100" in terminal.getvalue() and "2 min 00 s" in terminal.getvalue()


def test_a_page_of_several_runs_is_written_again_until_the_last_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, goes_on, path = written.run(tmp_path / "a", steps=3), under_way(tmp_path / "b"), tmp_path / "both.html"
    pages: list[str] = []

    def sleep(seconds: float) -> None:
        pages.append(path.read_text())
        (goes_on / "events.jsonl").write_text(written.lines(written.events(40)))

    monkeypatch.setattr("colonnade.report.write.time.sleep", sleep)
    write_report([ended, goes_on], path, live=7)
    refreshed = ['http-equiv="refresh" content="7"' in text for text in (*pages, path.read_text())]
    assert refreshed == [True, False]


def test_watch_shows_the_run_in_a_terminal(tmp_path: Path) -> None:
    written_to = StringIO()
    watch(written.run(tmp_path / "r"), every=1, console=Console(file=written_to, width=100))
    text = written_to.getvalue()
    assert (
        "r: finished" in text
        and "best validation" in text
        and "40 of 40" in text
        and "rank lost" in text
        and "█" in text
    )


def test_watch_shows_the_newest_events_and_none_of_the_setup(tmp_path: Path) -> None:
    folder, written_to = written.run(tmp_path / "r"), StringIO()
    saved = [
        {"time": 2000.0 + step, "event": "saved", "step": step, "checkpoint": f"c{step}"} for step in range(30, 37)
    ]
    begun = [{"time": 2100.0, "event": "resumed", "step": 36}, {"time": 2101.0, "event": "setup", "layout": "tp2"}]
    (folder / "events.jsonl").write_text(written.lines([*written.events(40)[:2], *saved, *begun]))
    watch(folder, every=1, once=True, console=Console(file=written_to, width=100))
    text = written_to.getvalue()
    assert [f"c{step}" in text for step in range(30, 37)] == [False, False, *5 * [True]]
    assert text.count("resumed") == 1 and "setup" not in text
