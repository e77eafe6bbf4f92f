"""Policies: files that come back equal, files that are wrong, and the pools and replays that work by them."""

import dataclasses
import inspect
import pickle
import re
import string
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import vpool
from tests.helpers.pools import MIB, run_cleanly
from tests.helpers.traces import FOLDER, SMALL, made
from vpool.commands import main
from vpool.policy import FORMAT_VERSION
from vpool.replay import policy_of
from vpool.sources import Source, current_device

TRACE = str(FOLDER / "two_streams.npz")
PAGE = Path(__file__).parents[1] / "docs" / "policies.rst"

HYBRID = """\
format_version = 1
rounding = 512
minimum_remainder = "1KiB"
fit = "good"

[strategy]
kind = "hybrid"
core = "4GiB"
block = ["1MiB", ["2MiB", 8]]
watermark = 0.75
smallest = 100
largest = "2MiB"

[strategy.dynamic]
initial = "128MiB"
growth = "64MiB"
limit = 0.5
adaptive = true

[source]
name = "simulated"
capacity = "16GiB"
"""
FIXED = """\
format_version = 1
[strategy]
kind = "fixed"
capacity = "1GiB"
"""
BARE = """\
format_version = 1
[strategy]
kind = "hybrid"
core = 256
"""
DYNAMIC = """\
format_version = 1
[strategy]
kind = "dynamic"
initial = "1MiB"
limit = "8MiB"
"""


def written(folder, text, name="policy.toml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def why_not(text):
    """The line that says why a text is no policy; None for one that comes back equal."""
    try:
        policy = vpool.Policy.loads(text)
    except vpool.FormatError as error:
        (line,) = str(error).splitlines()
        return line
    assert vpool.Policy.loads(policy.dumps()) == policy
    return None


class TestFile:
    """What a file means, and what becomes of a policy on its way through one."""

    def test_every_key_counts(self):
        policy = vpool.Policy.loads(HYBRID)
        dynamic = vpool.Dynamic(initial="128MiB", growth="64MiB", limit=0.5, adaptive=True)
        blocks = ["1MiB", ["2MiB", 8]]
        strategy = vpool.Hybrid("4GiB", blocks, watermark=0.75, dynamic=dynamic, smallest=100, largest="2MiB")
        assert policy == vpool.Policy(strategy, 512, "1KiB", "good", "simulated", {"capacity": "16GiB"})

    @pytest.mark.parametrize(
        ("table", "strategy"),
        [
            ('kind = "dynamic"', vpool.Dynamic()),
            ('kind = "fixed"\ncapacity = "1GiB"', vpool.Fixed("1GiB")),
            ('kind = "hybrid"\ncore = "1GiB"', vpool.Hybrid("1GiB")),
            ('kind = "hybrid"\ncore = "1GiB"\n[strategy.dynamic]', vpool.Hybrid("1GiB")),
            (
                'kind = "hybrid"\ncore = "1GiB"\ndynamic = {growth = 2.0}',
                vpool.Hybrid("1GiB", dynamic=vpool.Dynamic(growth=2.0)),
            ),
        ],
    )
    def test_what_is_not_said_is_the_default(self, table, strategy):
        assert vpool.Policy.loads(f"format_version = 1\n[strategy]\n{table}") == vpool.Policy(strategy)

    def test_what_was_written_is_read(self, tmp_path):
        path = tmp_path / "policy.toml"
        policy = vpool.Policy.loads(HYBRID)
        policy.save(path)
        assert path.read_text() == policy.dumps() == HYBRID
        assert vpool.Policy.load(path) == vpool.Policy.load(str(path)) == vpool.Policy.of(path) == policy

    def test_lists_and_tuples_of_blocks_are_the_same(self):
        sizes = [4096, (8192, 3)]
        policies = {vpool.Policy(vpool.Fixed("1MiB", block)) for block in (sizes, tuple(sizes), [4096, [8192, 3]])}
        assert len(policies) == 1

    def test_a_policy_is_a_value(self):
        policy = vpool.Policy.loads(HYBRID)
        assert pickle.loads(pickle.dumps(policy)) == policy
        assert hash(policy) == hash(vpool.Policy.loads(HYBRID))
        assert dataclasses.replace(policy, rounding=256) != policy
        with pytest.raises(dataclasses.FrozenInstanceError):
            policy.rounding = 256

    def test_options_are_the_policys_own(self):
        options = {"capacity": "1GiB"}
        policy = vpool.Policy(source="simulated", source_options=options)
        options["capacity"] = 5
        assert policy.source_options == {"capacity": "1GiB"}

    def test_a_strategy_that_files_do_not_know_is_not_written(self, tmp_path):
        class Own(vpool.Dynamic):
            pass

        with pytest.raises(TypeError, match="Own"):
            vpool.Policy(Own()).save(tmp_path / "policy.toml")
        assert not (tmp_path / "policy.toml").exists()

    def test_loading_touches_no_driver(self, tmp_path):
        path = written(tmp_path, DYNAMIC + '[source]\nname = "cuda"\n')
        code = f"import sys, vpool\nvpool.Policy.load({str(path)!r})\nprint([n for n in sys.modules if 'cuda' in n])"
        assert "cuda_driver" not in run_cleanly(code)


UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "M": 1 << 20, "GB": 10**9}
SPACES = st.text("\t\n\r\x0b\x0c ", max_size=2)


@st.composite
def sizes(draw, least, most):
    """A size in one of the ways that it can be written."""
    counts = {unit: (-(-least // factor), most // factor) for unit, factor in UNITS.items()}
    unit, (fewest, greatest) = draw(st.sampled_from([item for item in counts.items() if item[1][0] <= item[1][1]]))
    count = draw(st.integers(fewest, greatest))
    if draw(st.booleans()):
        return count * UNITS[unit]
    return f"{draw(SPACES)}{count}{draw(SPACES)}{unit}{draw(SPACES)}"


shares = st.floats(0, 1, exclude_min=True)
limits = shares | sizes(1 << 50, 1 << 60)
dynamics = st.builds(
    vpool.Dynamic,
    initial=sizes(0, 1 << 40),
    growth=st.floats(1, 16, exclude_min=True) | sizes(4096, 1 << 60),
    limit=limits,
    adaptive=st.sampled_from([False, True, "growth"]),
)
blocks = st.none() | sizes(1 << 16, 1 << 20)
blocks |= st.lists(sizes(1 << 16, 1 << 20) | st.tuples(sizes(1, 1 << 20), st.integers(1, 8)), min_size=1, max_size=4)
fixed = st.builds(
    vpool.Fixed, sizes(1 << 30, 1 << 38), blocks, oversize=st.sampled_from(["error", "direct"]), limit=limits
)
hybrid = st.builds(
    vpool.Hybrid,
    sizes(1 << 30, 1 << 38),
    blocks,
    watermark=shares | st.just(1),
    dynamic=dynamics,
    smallest=sizes(0, 1),
    largest=st.none() | sizes(1, 1 << 60),
)
simulated = st.fixed_dictionaries({}, optional={"capacity": sizes(0, 1 << 62), "base_offset": st.integers(0, 1 << 50)})
places = st.sampled_from([(None, {}), ("cuda", {}), ("host", {})]) | st.tuples(st.just("simulated"), simulated)
policies = st.builds(
    lambda place, *cut: vpool.Policy(*cut, source=place[0], source_options=place[1]),
    places,
    dynamics | fixed | hybrid,
    st.integers(8, 21).map(lambda power: 1 << power) | st.just(" 4 KiB"),
    sizes(256, 1 << 62),
)


@given(policies)
@example(vpool.Policy(vpool.Dynamic(growth=1.0000000000000002, limit=5e-324)))
@example(vpool.Policy(vpool.Dynamic(initial="\t\r\n\x0b 1\x0c GiB")))
@example(vpool.Policy(vpool.Hybrid(2**63 - 1, watermark=1, dynamic=vpool.Dynamic(limit=2**63 - 1))))
def test_what_is_saved_loads_equal(policy):
    loaded = vpool.Policy.loads(policy.dumps())
    assert loaded == policy
    assert repr(loaded) == repr(policy)
    assert loaded.dumps() == policy.dumps()


PLACES = [
    (line.split(" = ")[0], HYBRID.replace(line, f"{line.split(' = ')[0]} = %s").split("%s"))
    for line in HYBRID.splitlines()
    if " = " in line
]
VALUES = [
    *("true", "-1", "0", "1", "3", "1.5", "0.0", "nan", "inf", "-inf", "9223372036854775808", "0x" + "f" * 5000),
    *('""', '"lots"', '"-1MiB"', '"1MiB"', '"good"', '"9999999999999P"', r'"\n\u0000"', "[]", "[[]]", "[1, [2, true]]"),
    *("{}", '{kind = "fixed"}', "1979-05-27", "07:32:00", "[[[1]]]", '["1MiB", ["1MiB", "two"]]', "[1e9]"),
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("key", "around"), PLACES)
def test_any_value_at_any_key_is_good_or_its_error_names_the_key(key, around, value):
    reason = why_not(value.join(around))
    if reason is not None:
        # Of two keys that contradict each other one stands in front.
        assert re.match(r"[a-z_.]+: .", reason)
        assert re.search(rf"\b{key}\b", reason)


@given(st.data())
def test_any_text_is_good_or_has_one_line_that_says_why(data):
    text = data.draw(st.sampled_from([HYBRID, FIXED, DYNAMIC]))
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(text)))
        end = begin + data.draw(st.integers(0, 12))
        text = text[:begin] + data.draw(st.text(max_size=4) | st.text(string.printable, max_size=9)) + text[end:]
    why_not(text)


MISTAKES = {
    "no table": ("fit", "fit good\nfit", "not TOML: .*line 4"),
    "an open string": ('"good"', '"good', "not TOML: .*line 4"),
    "an array without end": ("largest = ", "largest = [", "not TOML: .*line"),
    "a key twice": ("fit", 'fit = "good"\nfit', "not TOML: .*line 5"),
    "nothing": (HYBRID, "", "format_version: missing"),
    "no version": ("format_version = 1\n", "", "format_version: missing"),
    "a newer version": ("= 1\n", "= 2\n", f"format_version: .*2.*{FORMAT_VERSION}"),
    "a newer version that looks different": (HYBRID, "format_version = 7\nstrategies = 3", f"7.*{FORMAT_VERSION}"),
    "a version of 0": ("= 1\n", "= 0\n", "format_version: .*integer of at least 1"),
    "a version that is a boolean": ("= 1\n", "= true\n", "format_version: .*integer of at least 1"),
    "a version that is a string": ("= 1\n", '= "1"\n', "format_version: .*integer of at least 1"),
    "an unknown key": ("minimum_remainder", "minimum_reminder", "minimum_reminder: .*'minimum_remainder'"),
    "an unknown key like no other": ("fit =", "zzz =", "zzz: .*'format_version'.*'fit'"),
    "an unknown key of a strategy": ("watermark", "watermrak", r"strategy\.watermrak: .*'watermark'"),
    "an unknown key with a line break": ("watermark", r'"a\nb"', r"strategy\.'a\\nb': unknown"),
    "an unknown table": ("[source]", "[sauce]", "sauce: .*'source'"),
    "a key of another kind": ('kind = "hybrid"', 'kind = "fixed"', r"strategy\.core: unknown.*'capacity'"),
    "an unknown key of the dynamic area": ("growth", "grwoth", r"strategy\.dynamic\.grwoth: .*'growth'"),
    "no strategy": (HYBRID, "format_version = 1", "strategy: missing"),
    "a strategy that is no table": (HYBRID, "format_version = 1\nstrategy = 5", "strategy: .*table, not an integer"),
    "no kind": ('kind = "hybrid"\n', "", r"strategy\.kind: missing"),
    "an unknown kind": ('"hybrid"', '"hybird"', r"strategy\.kind: .*'hybird'.*'hybrid'"),
    "an unknown kind like no other": ('"hybrid"', '"best"', r"strategy\.kind: .*'dynamic', 'fixed', 'hybrid'"),
    "a kind that is a number": ('"hybrid"', "3", r"strategy\.kind: must be a string, not an integer"),
    "no core": ('core = "4GiB"\n', "", r"strategy\.core: missing"),
    "a core of no size": ('"4GiB"', "4.5", r"strategy\.core: .*integer or a string, not float"),
    "a negative core": ('"4GiB"', "-4096", r"strategy\.core: .*not be negative"),
    "a core beyond 63 bits": ('"4GiB"', '"9999999PiB"', r"strategy\.core: .*63 bits"),
    "a core with another unit": ('"4GiB"', '"4 gigs"', r"strategy\.core: .*such as \"256MiB\", not '4 gigs'"),
    "a core that is a date": ('"4GiB"', "1979-05-27", r"strategy\.core: .*integer or a string"),
    "blocks larger than the core": ('["2MiB", 8]', '["2MiB", 8000]', r"strategy\.block: .*more than core"),
    "a block of no size": ('"1MiB", [', "1.5, [", r"strategy\.block: block must be an integer or a string, not float"),
    "a watermark above 1": ("0.75", "1.5", r"strategy\.watermark: .*at most 1, got 1.5"),
    "a watermark that is a string": ("0.75", '"high"', r"strategy\.watermark: .*must be a number, not str"),
    "a band without sizes": ("smallest = 100", 'smallest = "3MiB"', r"strategy\.smallest: .*largest request"),
    "a growth that shrinks": ('"64MiB"', "0.5", r"strategy\.dynamic\.growth: .*above 1"),
    "a growth in whole numbers": ('"64MiB"', "2", r"strategy\.dynamic\.growth: .*such as 2.0"),
    "a limit above 1.0": ("0.5", "1.5", r"strategy\.dynamic\.limit: .*at most 1, got 1.5"),
    "a boolean that is a number": ("true", "1", r"strategy\.dynamic\.adaptive: .*bool, not int"),
    "a dynamic area that is no table": (HYBRID, BARE + "dynamic = 5", r"strategy\.dynamic: .*table, not an integer"),
    "a core larger than the limit": ("limit = 0.5", 'limit = "2GiB"', r"strategy\.core: core is 4.00 GiB, more than"),
    "a first segment larger than the limit": (HYBRID, DYNAMIC.replace("1M", "9M"), r"strategy\.initial: .*9.00 MiB"),
    "one of the dynamic area": (HYBRID, BARE + "dynamic = {initial = 512, limit = 256}", r"\.dynamic\.initial: .*512"),
    "a capacity larger than the limit": (HYBRID, FIXED + 'limit = "1MiB"', r"strategy\.capacity: .*1.00 GiB, more"),
    "no capacity": (HYBRID, FIXED.replace('capacity = "1GiB"', ""), r"strategy\.capacity: missing"),
    "an unknown oversize": (HYBRID, FIXED + 'oversize = "later"', r"strategy\.oversize: .*\"error\" or \"direct\""),
    "a rounding between powers": ("512", "768", "rounding: .*power of two from 256 to 2MiB, got 768"),
    "a rounding too small": ("512", "128", "rounding: .*power of two from 256"),
    "a rounding too large": ("512", '"4MiB"', "rounding: .*to 2MiB, got '4MiB'"),
    "a negative rounding": ("512", "-512", "rounding: .*not be negative"),
    "a rounding that is a share": ("512", "0.5", "rounding: .*integer or a string, not float"),
    "a remainder too small": ('"1KiB"', "255", "minimum_remainder: .*at least 256"),
    "an unknown fit": ('"good"', '"best"', "fit: no fit 'best'; .*'good'"),
    "a source that is no table": (HYBRID, 'source = "host"\n' + DYNAMIC, "source: must be a table, not a string"),
    "a source without a name": ('name = "simulated"\n', "", r"source\.name: missing"),
    "an unknown source": ('"simulated"', '"simulate"', r"source\.name: .*'simulate'.*'simulated'"),
    "an unknown option": ("capacity", "capcity", r"source\.capcity: .*'capacity'"),
    "an option of another source": ('"simulated"', '"host"', r"source\.capacity: unknown"),
    "a device": ("capacity = ", "device = ", r"source\.device: unknown"),
    "a negative option": ('"16GiB"', "-1", r"source\.capacity: .*not be negative"),
    "no whole handle": ('ed"\ncapacity = "16GiB"', 'ed-vmm"\nhandle = "3MiB"', r"source\.handle: .*multiple of 2"),
    "a word for a boolean": ('ed"\ncapacity = "16GiB"', 'ed-vmm"\ntight = "yes"', r"source\.tight: .*boolean, not str"),
    "an option of the wrong type": ('capacity = "16GiB"', 'base_offset = "far"', r"source\.base_offset: "),
}  # fmt: skip


class TestMistakes:
    """A wrong file has one line that names the file, the key, and what was expected."""

    @pytest.mark.parametrize("mistake", MISTAKES)
    def test_on_the_command_line(self, mistake, tmp_path, capsys):
        old, new, message = MISTAKES[mistake]
        assert old in HYBRID
        path = written(tmp_path, HYBRID.replace(old, new, 1))
        assert main(["replay", TRACE, "--strategy", str(path)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert re.fullmatch(rf"vpool replay: {re.escape(str(path))}: .*\n", err)
        assert re.search(message, err), err
        with pytest.raises(vpool.FormatError, match=message):
            vpool.Policy.load(path)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"format_version = 1\n\xff\n", "UTF-8 text .at line 2"),
            (b"\xef\xbb\xbfformat_version = 1", "line 1"),
            (b"a = " + b"[" * 100_000, "not TOML"),
            (b"a = " + b"9" * 5000, "not TOML"),
            ((FOLDER / "two_streams.npz").read_bytes(), "not TOML"),
        ],
        ids=["bytes", "a mark of order", "depth", "digits", "a trace"],
    )
    def test_what_is_no_text_at_all(self, data, message, tmp_path, capsys):
        path = written(tmp_path, data)
        assert main(["replay", TRACE, "--strategy", str(path)]) == 1
        err = capsys.readouterr().err
        assert re.fullmatch(rf"vpool replay: {re.escape(str(path))}: .*\n", err)
        assert re.search(message, err), err

    def test_a_file_that_is_not_there(self, tmp_path, capsys):
        path = tmp_path / "none.toml"
        with pytest.raises(FileNotFoundError):
            vpool.Policy.load(path)
        with pytest.raises(FileNotFoundError):
            vpool.replay(made(*SMALL), str(path))
        assert main(["replay", TRACE, "--strategy", str(path)]) == 1
        assert re.fullmatch(r"vpool replay: .*No such file.*none\.toml.*\n", capsys.readouterr().err)

    def test_a_folder_or_a_word_is_no_strategy(self, tmp_path, capsys):
        for word in ("best", str(tmp_path)):
            assert main(["replay", TRACE, "--strategy", word]) == 1
            assert re.fullmatch(r"vpool replay: no strategy .*dynamic.*policy file\n", capsys.readouterr().err)

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"strategy": "dynamic"}, TypeError),
            ({"strategy": vpool.Dynamic}, TypeError),
            ({"strategy": vpool.Hybrid("2GiB", dynamic=vpool.Dynamic(limit="1GiB"))}, ValueError),
            ({"strategy": vpool.Dynamic("2GiB", limit="1GiB")}, ValueError),
            ({"rounding": 0}, ValueError),
            ({"rounding": True}, TypeError),
            ({"rounding": 2**63}, OverflowError),
            ({"minimum_remainder": 255}, ValueError),
            ({"minimum_remainder": None}, TypeError),
            ({"fit": "best"}, ValueError),
            ({"fit": None}, ValueError),
            ({"source": "nowhere"}, ValueError),
            ({"source": vpool.sources.Host()}, TypeError),
            ({"source": "host", "source_options": None}, TypeError),
            ({"source": "host", "source_options": {"capacity": 5}}, ValueError),
            ({"source": "cuda", "source_options": {"device": 0}}, ValueError),
            ({"source": "simulated", "source_options": {"capacity": -5}}, ValueError),
            ({"source": "simulated", "source_options": {"capacity": None}}, TypeError),
            ({"source_options": {"capacity": 5}}, ValueError),
        ],
    )
    def test_in_python(self, arguments, error):
        with pytest.raises(error):
            vpool.Policy(**arguments)

    def test_the_default_first_segment_gives_way_to_the_limit(self):
        assert vpool.Policy(vpool.Dynamic(limit="1MiB")).strategy.limit == "1MiB"

    @pytest.mark.parametrize("nothing", [None, 5, b"policy.toml", vpool.Policy])
    def test_what_no_policy_can_be_had_of(self, nothing):
        with pytest.raises(TypeError):
            vpool.Policy.of(nothing)


class TestPoolArguments:
    """What a pool is made with."""

    def test_they_make_a_pool(self):
        arguments = vpool.Policy.loads(DYNAMIC).pool_arguments(source="host")
        with vpool.Pool(**arguments) as pool:
            assert pool.inspect().limit_bytes == 8 * MIB

    def test_sizes_are_integers(self):
        arguments = vpool.Policy(rounding="2KiB", minimum_remainder="1MiB").pool_arguments(source="host")
        assert (arguments["rounding"], arguments["minimum_remainder"]) == (2048, MIB)

    def test_options_reach_the_source(self):
        source = vpool.Policy.loads(HYBRID).pool_arguments()["source"]
        assert (source.name, source.memory()[1]) == ("simulated", 16 << 30)

    def test_another_source_takes_the_place_of_the_policys(self):
        mine = vpool.sources.Host()
        policy = vpool.Policy.loads(HYBRID)
        assert policy.pool_arguments(source=mine)["source"] is mine
        assert policy.pool_arguments(source="host")["source"].name == "host"

    def test_without_a_source_it_is_the_best_one(self):
        assert vpool.Policy().pool_arguments()["source"].name == vpool.sources.resolve().name

    def test_the_device_reaches_the_source(self, monkeypatch):
        asked = []

        def make(device=None, *, option=1):
            asked.append((device, option))
            return vpool.sources.Host()

        monkeypatch.setitem(vpool.sources.BY_NAME, "other", make)
        policy = vpool.Policy(source="other", source_options={"option": 3})
        assert isinstance(policy.pool_arguments(device=0)["source"], Source)
        assert asked == [(0, 3)]

    @pytest.mark.parametrize("text", [HYBRID, DYNAMIC + '[source]\nname = "host"'])
    @pytest.mark.parametrize(("device", "error"), [(-1, ValueError), (999, ValueError), ("0", TypeError)])
    def test_a_device_that_is_not_there(self, text, device, error):
        with pytest.raises(error):
            vpool.Policy.loads(text).pool_arguments(device)


class TestReplay:
    """A strategy may be a name, a policy, or its file."""

    @pytest.mark.parametrize("name", ["policy.toml", "policy", "policy.txt"])
    def test_a_file(self, name, tmp_path, capsys):
        expected = vpool.replay(TRACE, vpool.Dynamic("1MiB", growth="32MiB")).peak_reserved_bytes
        path = tmp_path / name
        vpool.Policy(vpool.Dynamic("1MiB", growth="32MiB")).save(path)
        for strategy in (path, str(path), vpool.Policy.load(path)):
            assert vpool.replay(TRACE, strategy).peak_reserved_bytes == expected
        assert main(["replay", TRACE, "--strategy", str(path), "--json"]) == 0
        assert f'"peak_reserved_bytes": {expected},' in capsys.readouterr().out

    def test_a_name_is_a_name_even_where_a_file_has_it(self, tmp_path, monkeypatch):
        written(tmp_path, FIXED, "dynamic")
        monkeypatch.chdir(tmp_path)
        assert policy_of("dynamic") == policy_of(None) == policy_of(vpool.Dynamic()) == vpool.Policy()

    def test_the_policys_source_is_not_the_replays(self):
        policy = vpool.Policy(source="cuda")
        assert vpool.replay(made(*SMALL), policy).oom is None
        small = vpool.Policy(vpool.Dynamic(limit=1.0), source="simulated", source_options={"capacity": "1MiB"})
        assert vpool.replay(made((1, 2 * MIB)), small).oom is None
        assert vpool.replay(made((1, 2 * MIB)), small, source=None).oom["event"] == 0

    @pytest.mark.parametrize("capacity", [None, "64MiB"])
    def test_how_blocks_are_cut_reaches_the_pool(self, capacity):
        trace = made((1, 100), (2, 5000))
        plain = vpool.replay(trace, vpool.Policy(), capacity=capacity)
        assert plain.peak_allocated_bytes == 256 + 5120
        rounded = vpool.replay(trace, vpool.Policy(rounding=4096), capacity=capacity)
        assert rounded.peak_allocated_bytes == 4096 + 8192
        whole = vpool.replay(trace, vpool.Policy(minimum_remainder="1GiB"), capacity=capacity)
        assert whole.peak_allocated_bytes >= 64 * MIB, "no block is cut that would leave less than a GiB"


@pytest.mark.usefixtures("no_default_pools")
class TestVariable:
    """VPOOL_POLICY is the policy of default pools."""

    @pytest.fixture
    def use(self, monkeypatch, tmp_path):
        """Make the variable name a file of this text."""
        return lambda text: monkeypatch.setenv("VPOOL_POLICY", str(written(tmp_path, text)))

    HOST = DYNAMIC + '[source]\nname = "host"\n'

    def test_it_sets_the_policy(self, use):
        use(self.HOST)
        with vpool.default_pool(0) as pool:
            assert pool.strategy == vpool.Dynamic("1MiB", limit="8MiB")
            assert (pool.source.name, pool.name, pool.inspect().limit_bytes) == ("host", "default-0", 8 * MIB)

    def test_without_a_source_it_is_the_best_one_of_the_device(self, use):
        use(DYNAMIC)
        with vpool.default_pool() as pool:
            assert (pool.source.name, pool.device) == (vpool.sources.resolve().name, current_device())

    def test_it_is_read_whenever_a_pool_is_made(self, use, monkeypatch):
        monkeypatch.delenv("VPOOL_POLICY", raising=False)
        with vpool.default_pool() as pool:
            use(self.HOST)
            assert vpool.default_pool() is pool
            assert pool.strategy == vpool.Dynamic()
        with vpool.default_pool(0) as pool:
            assert pool.strategy == vpool.Dynamic("1MiB", limit="8MiB")

    def test_an_empty_one_is_none(self, monkeypatch):
        monkeypatch.setenv("VPOOL_POLICY", "")
        with vpool.default_pool() as pool:
            assert pool.strategy == vpool.Dynamic()

    def test_other_pools_do_not_know_it(self, use):
        use("nonsense")
        with vpool.Pool(source="host") as pool:
            assert pool.strategy == vpool.Dynamic()

    @pytest.mark.parametrize(
        ("text", "error", "message"),
        [
            ("nonsense", vpool.FormatError, r"policy\.toml: not TOML: .*line 1"),
            (HOST.replace("1MiB", "9MiB"), vpool.FormatError, r"policy\.toml: strategy\.initial: "),
            (HOST.replace("1MiB", "9PiB").replace('"8MiB"', "0.5"), ValueError, "initial is 9.00 PiB"),
        ],
    )
    def test_what_is_wrong_names_it(self, use, text, error, message):
        use(text)
        with pytest.raises(error, match=f"^VPOOL_POLICY: .*{message}"):
            vpool.default_pool(0)
        assert vpool.defaults._defaults == {}
        use(self.HOST)
        vpool.default_pool(0).close()

    def test_a_file_that_is_not_there(self, monkeypatch, tmp_path):
        path = str(tmp_path / "none.toml")
        monkeypatch.setenv("VPOOL_POLICY", path)
        with pytest.raises(FileNotFoundError, match="VPOOL_POLICY: No such file") as caught:
            vpool.allocate(100)
        assert caught.value.filename == path

    def test_a_source_that_cannot_be_used_keeps_its_name(self, use, monkeypatch):
        def refuse(again=False):
            raise vpool.SourceError("no CUDA today", "cudaErrorNoDevice")

        monkeypatch.setattr(vpool.sources, "_load_cuda", refuse)
        use(self.HOST.replace('"host"', '"cuda"'))
        with pytest.raises(vpool.SourceError, match=r"^VPOOL_POLICY: no CUDA today$") as caught:
            vpool.default_pool(0)
        assert caught.value.name == "cudaErrorNoDevice"


def test_the_page_has_every_key():
    documented = set(re.findall(r"^   \* - ``([a-z_.]+)``$", PAGE.read_text(), re.MULTILINE))
    keys = {"format_version", "strategy.kind", "source.name", "rounding", "minimum_remainder", "fit"}
    for make in vpool.sources.BY_NAME.values():
        keys |= {f"source.{option}" for option in inspect.signature(make).parameters if option != "device"}
    for cls in (vpool.Dynamic, vpool.Fixed, vpool.Hybrid):
        keys |= {one.name for one in dataclasses.fields(cls)}
    assert documented == keys
