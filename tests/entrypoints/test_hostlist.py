import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoints.hostlist import LONGEST_NAME, HostlistError, compress, expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node1,node2", ["node1", "node2"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("node[3,1-2]", ["node3", "node1", "node2"]),
        ("n[1-2]-ib0", ["n1-ib0", "n2-ib0"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("a[1-2],b,c[7]", ["a1", "a2", "b", "c7"]),
        ("n1,n1", ["n1", "n1"]),
        ("[1-2]", ["1", "2"]),
        ("gpu-a.example.org", ["gpu-a.example.org"]),
        ("a[1-2]b[1-2]c[1-2]", [f"a{a}b{b}c{c}" for b in "12" for a in "12" for c in "12"]),  # as scontrol does
        ("n[98-101]", ["n98", "n99", "n100", "n101"]),
        ("n[1-9/4]", ["n1", "n5", "n9"]),
        ("n[01-10/3,20]-ib[0-1]", [f"n{n}-ib{i}" for n in ("01", "04", "07", "10", "20") for i in "01"]),
    ],
)
def test_expands(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("n1,,n2", "empty"),
        ("n1,", "empty"),
        ("n[1-2", "never closed"),
        ("n1-2]", "unexpected ']'"),
        ("n[1[2]]", "unexpected '['"),
        ("n[]", "not a number"),
        ("n[1,]", "not a number"),
        ("n[a-b]", "not a number"),
        ("n[-3]", "not a number"),
        ("n[1-2-3]", "not a number"),
        ("n[5-3]", "backwards"),
        ("n[1-9/0]", "the step of '1-9/0' is 0"),
        ("n[3/2]", "not a number"),
        ("n[0-99999999/2]", "more than"),
        ("n 1", "not part of a host name"),
        ("n1;reboot", "not part of a host name"),
        ("n[\u0661-\u0663]", "not a number"),
        ("n[1-999999999]", "more than"),
        ("n[1-300]m[1-300]", "more than"),
        ("n[1-2]m[1-2]" + "x[1-9]" * 40, "more than"),
        ("n[1-" + "9" * 5000 + "]", "too many digits"),
        ("n[1-2]," + "n" * 254, "has 254 characters, a host name has at most 253"),
        ("n" * 250 + "[9998-10001]", "has 255 characters"),
    ],
)
def test_refuses(text: str, reason: str) -> None:
    with pytest.raises(HostlistError, match=reason.replace("[", r"\[").replace("]", r"\]")):
        expand(text)


literals = st.text(alphabet="abcz09.-_", max_size=4)
ranges = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4))
brackets = st.lists(ranges, min_size=1, max_size=3)
items = st.tuples(literals.filter(bool), st.lists(st.tuples(brackets, literals), max_size=2))


def written(item: tuple[str, list[tuple[list[tuple[int, int, int]], str]]]) -> str:
    text, pieces = item
    for bracket, literal in pieces:
        parts = [f"{low:0{width}}" + (f"-{low + extra:0{width}}" if extra else "") for low, extra, width in bracket]
        text += "[" + ",".join(parts) + "]" + literal
    return text


def meant(item: tuple[str, list[tuple[list[tuple[int, int, int]], str]]]) -> list[str]:
    names, pieces = [item[0]], item[1]
    for bracket, literal in pieces:
        numbers = []
        for low, extra, width in bracket:
            padding = max(width, len(str(low)))
            numbers += [f"{number:0{padding}}" for number in range(low, low + extra + 1)]
        names = [name + number + literal for name, number in itertools.product(names, numbers)]
    return names


@given(st.lists(items, min_size=1, max_size=4))
def test_expands_compressed_names(structure: list[tuple[str, list[tuple[list[tuple[int, int, int]], str]]]]) -> None:
    text = ",".join(written(item) for item in structure)
    assert expand(text) == [name for item in structure for name in meant(item)]


@given(st.text(alphabet="n.", min_size=1, max_size=300), st.integers(0, 10**6))
def test_no_name_is_longer_than_dns_allows(name: str, number: int) -> None:
    if len(name) + len(str(number)) <= LONGEST_NAME:
        assert expand(f"{name}[{number}]") == [f"{name}{number}"]
        return
    with pytest.raises(HostlistError, match="a host name has at most 253"):
        expand(f"{name}[{number}]")


@given(st.text(alphabet="n09-,[] ", max_size=30))
def test_any_text_expands_or_is_refused(text: str) -> None:
    try:
        hosts = expand(text)
    except HostlistError:
        return
    assert hosts
    assert all(host and not set(host) & set("[], ") for host in hosts)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (["n1"], "n1"),
        (["n1", "n2", "n3"], "n[1-3]"),
        (["n08", "n09", "n10", "n11"], "n[08-11]"),
        (["n8", "n9", "n10"], "n[8-10]"),
        (["n9", "n010"], "n[9,010]"),
        (["n1", "n3", "n2"], "n[1,3,2]"),
        (["n1", "n1"], "n[1,1]"),
        (["r1n1-ib", "r1n2-ib", "r2n1-ib"], "r1n[1-2]-ib,r2n1-ib"),
        (["login", "n1", "n2"], "login,n[1-2]"),
    ],
)
def test_compresses(hosts: list[str], text: str) -> None:
    assert compress(hosts) == text
    assert expand(text) == hosts


@given(st.lists(items, min_size=1, max_size=4))
def test_compressing_is_the_inverse_of_expanding(
    structure: list[tuple[str, list[tuple[list[tuple[int, int, int]], str]]]],
) -> None:
    names = [name for item in structure for name in meant(item)]
    assert expand(compress(names)) == names
