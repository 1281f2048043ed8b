from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.pods.hostfile import HostEntry, Hostfile, check_address, check_port, check_user
from workbench.pods.pod import Pod

DEEPSPEED = """\
# the cluster of the second floor
127.0.0.2 slots=4

127.0.0.3\tslots=4   # was 8
gpu-3.example.org slots=1
"""

OPENMPI = """\
node-a slots=2 max_slots=4
node-b max-slots=2 slots=2
node-c
192.168.1.7   slots=3
fd00::7 slots=1
"""

HOSTILE = [
    "-oProxyCommand=touch${IFS}canary",
    "exec:x",
    "ssh:10.0.0.1",
    "a;id",
    "a|b",
    "a&b",
    "$(id)",
    "`id`",
    "^/etc/passwd",
    "/regex/",
    "n[1-3]",
    "host1,host2",
    "root@host",
    "fe80::1%eth0",
    "[::1]",
    "host:22",
    "a" * 300,
    "x.".rjust(200, "x"),
    "-host",
    "host-",
    "a..b",
    ".a",
    "a.",
    "under_score",
    "größe",
    "１２７.0.0.1",
    "127.1",
    "0x7f000001",
    "2130706433",
    "127.0.0.01",
    "0.0.0.0",
    "::",
    "224.0.0.1",
    "",
    " ",
    "a b",
    "a\nb",
    "a\0",
    "a\n",
    "~",
    "*",
    "!a",
    "%h",
    "a'b",
    'a"b',
    "a\\b",
    "a#b",
    "a=b",
    "{a,b}",
]


def test_deepspeed_form() -> None:
    hosts = Hostfile.parse(DEEPSPEED)
    assert [(e.address, e.slots) for e in hosts.entries] == [
        ("127.0.0.2", 4),
        ("127.0.0.3", 4),
        ("gpu-3.example.org", 1),
    ]
    assert hosts.world_size == 9
    assert str(hosts) == "127.0.0.2 slots=4\n127.0.0.3 slots=4\ngpu-3.example.org slots=1\n"


def test_openmpi_form() -> None:
    hosts = Hostfile.parse(OPENMPI)
    assert [e.slots for e in hosts.entries] == [2, 2, 1, 3, 1]
    assert hosts.format("openmpi").splitlines()[2] == "node-c slots=1 max_slots=1"


def test_deepspeeds_own_parser_agrees() -> None:
    from deepspeed.launcher import runner

    hosts = Hostfile.parse(OPENMPI)
    pool = runner._parse_hostfile(str(hosts).splitlines(keepends=True))
    assert list(pool.items()) == [(e.address, e.slots) for e in hosts.entries]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("# nothing\n\n", "names no host"),
        ("a slots=1\n\nb slots=0\n", "line 3: slots of b is 0"),
        ("a slots=-2", "line 1: slots of a is -2"),
        ("a slots=9999999", "line 1"),
        ("a slots=99999999999999999999", "line 1"),
        ("a slots=x", "line 1: 'slots=x' is not `slots=N`"),
        ("a slots=1.5", "line 1"),
        ("a slots=١", "line 1"),
        ("a slots=1 slots=2", "line 1: slots is given twice"),
        ("a slots=4 max_slots=2", "line 1: max_slots=2 is less than slots=4"),
        ("a b slots=1", "line 1: 'b' is not `slots=N`"),
        ("a\nb\nA slots=2", "line 3: host A stands on line 1 already"),
        ("127.0.0.2\n::ffff:127.0.0.2", "line 2"),
        ("fd00::1\nfd00:0:0::1", "line 2"),
        (
            "ok\n-oProxyCommand=id slots=1",
            "line 2: '-oProxyCommand=id' is not an IP address or a host name",
        ),
        ("ok\ra slots=1", "line 1"),
    ],
)
def test_refusals_name_source_and_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Hostfile.parse(text, source="my/hostfile")
    assert str(caught.value).startswith("my/hostfile")
    assert words in str(caught.value)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_address(text)
    assert len(str(caught.value)) < 130
    with pytest.raises(ConfigError):
        HostEntry(address=text)
    if "\n" not in text:  # as a file, that is two lines
        with pytest.raises(ConfigError):
            Hostfile.parse(f"{text} slots=1\nother")


@pytest.mark.parametrize(
    "text", ["127.0.0.2", "::1", "fd00::a", "localhost", "pod-0.svc.cluster.local", "3com.example"]
)
def test_ordinary_addresses_stay_as_they_are(text: str) -> None:
    assert check_address(text) == text


@pytest.mark.parametrize("text", ["fe80::1%eth0", "::1%1", "fe80::1%e th", "fe80::1%é"])
def test_a_zone_is_refused_as_a_zone(text: str) -> None:
    with pytest.raises(ConfigError, match=sentence("an interface of this machine alone")):
        check_address(text)
    check_address(text.partition("%")[0])  # the advice


@pytest.mark.parametrize(
    ("text", "words", "advised"),
    [
        ("gpu_1", sentence("no _ stands in a host name. Give its IP address"), "10.0.0.4"),
        ("gpu_node_1.lab", sentence("no _ stands in a host name. Give its IP address"), "::1"),
        ("gpu-1.lab.", sentence("leave out the dot at its end"), "gpu-1.lab"),
    ],
)
def test_a_name_that_dns_or_windows_would_take_is_refused_with_the_reason(
    text: str, words: str, advised: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_address(text)
    check_address(advised)


@pytest.mark.parametrize("port", [0, -1, 65536, True, "22", 2.0, None])
def test_ports(port: object) -> None:
    with pytest.raises(ConfigError):
        check_port(port)  # type: ignore[arg-type]


DIRECTORY_ACCOUNTS = [
    "47470001",
    "1a",
    "ada.b",
    "Ada",
    "ada@corp.example",
    "CORP\\ada",
    "gpu-1$",
    "_x",
    "a+b#1",
    "adélaïde",
]
"""Accounts as LDAP, AD and realms have them."""
INJECTIONS = ["", "-l", "a b", "a;b", "a\n", "a\tb", "$x", "${HOME}", "$(id)", "a'b", 'a"b']
INJECTIONS += ["a`b`", "a|b", "a&b", "a>b", "%h", "a\\", "a\\\\b", 'a\\"']
INJECTIONS += ["\x1b[1m", "\u2028", "\0", "x" * 300]


@pytest.mark.parametrize("user", DIRECTORY_ACCOUNTS)
def test_accounts_of_directories_are_users(user: str) -> None:
    assert check_user(user) == user


@pytest.mark.parametrize("user", INJECTIONS)
def test_users(user: str) -> None:
    with pytest.raises(ConfigError):
        check_user(user)


def test_pods_make_a_hostfile() -> None:
    pods = [Pod(name=f"pod-{i}", address=f"127.0.0.{i + 2}", slots=i + 1) for i in range(3)]
    assert Hostfile.from_pods(pods).addresses == ("127.0.0.2", "127.0.0.3", "127.0.0.4")
    with pytest.raises(
        ConfigError, match=sentence("host {} stands twice in the hostfile (first as {})")
    ):
        Hostfile.from_pods([pods[0], pods[0]])
    with pytest.raises(ConfigError):
        Hostfile.from_pods([Pod(name="pod-0")])


def test_the_hash_tells_an_edit() -> None:
    hosts = Hostfile.parse("a slots=1")
    assert hosts.sha256 == Hostfile.parse("# note\n a   slots=1\n").sha256
    assert hosts.sha256 != Hostfile.parse("a slots=1\nb slots=1").sha256


octet = st.integers(1, 223)
labels = st.from_regex(r"\A[a-z]([a-z0-9-]{0,10}[a-z0-9])?\Z")
addresses = st.one_of(
    st.builds("{}.{}.{}.{}".format, octet, octet, octet, octet),
    st.lists(labels, min_size=1, max_size=4).map(".".join),
    st.ip_addresses(v=6)
    .filter(lambda a: not (a.is_multicast or a.is_unspecified or a.ipv4_mapped or a.scope_id))
    .map(str),
)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(addresses, st.integers(1, 4096)), min_size=1, max_size=8, unique_by=lambda e: e[0]
    ),
    st.sampled_from(["deepspeed", "openmpi"]),
)
def test_round_trip(pairs: list[tuple[str, int]], form: str) -> None:
    hosts = Hostfile(entries=tuple(HostEntry(address=a, slots=n) for a, n in pairs))
    assert Hostfile.parse(hosts.format(form)) == hosts  # type: ignore[arg-type]


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet="ab1.-:;|&$`'\"\\<>^/@[]~#%={}()*!, \t\n\r\0é", max_size=30))
def test_nothing_nasty_survives_parsing(text: str) -> None:
    try:
        hosts = Hostfile.parse(text)
    except ConfigError:
        return
    assert not set("".join(hosts.addresses)) & set(";|&$`'\"\\<>^/@[]~#%={}()*!, \t\n\r\0é")
    assert not any(address.startswith("-") for address in hosts.addresses)
