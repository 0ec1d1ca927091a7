"""What `launch` reads: host lists, schedulers' variables, lines of the control port."""

from random import Random

from entrypoints.environments import detect
from entrypoints.errors import DetectionError
from entrypoints.hostlist import HostlistError, compress, expand
from entrypoints.job.hello import check_form
from entrypoints.wire.channel import ChannelLostError, field, parse
from entrypoints.wire.handshake import _rank
from tests.entrypoints.environments.test_malformed import DAMAGE, NAMES, OURS, RECORDED
from tests.fuzz.damage import Target, octets, text

HOSTS = ("node1", "node[1-3]", "n[08-11,3]-ib[0-1]", "r[1-2]n[01-02],c", "n[01-10/3]", "gpu-a.example.org", "a[1-2],b")
LINES = (
    '{"slipway": 1, "nonce": "00ff"}',
    '{"nonce": "00ff", "rank": 1, "host": "n1", "proof": "00ff"}',
    '{"hello": {"rank": 1, "local_rank": 0, "hostname": "n1", "cpus": 8, "gpus": 0, "fabric": {}, "clock": 1.5, '
    '"unfit": [{"check": "disk", "message": "full", "fix": "free some"}], "request": null}}',
    '{"refused": "wrong token"}',
)


def variables(random: Random) -> dict[str, str]:
    environment = dict(random.choice([{}, *RECORDED]))
    for _ in range(random.randrange(4)):
        name = random.choice([*NAMES, *OURS])
        choices = (
            *DAMAGE,
            environment.get(name, ""),
            text(random, HOSTS),
            text(random, [environment.get(name, "4(x2)")]),
        )
        environment[name] = random.choice(choices).replace("\0", "")
    for name in random.sample(NAMES, random.randrange(3)):
        environment.pop(name, None)
    return {**environment, "PATH": ""}


def read_line(line: bytes) -> None:
    message = parse(line)
    if "hello" in message:
        check_form(field(message, "hello", dict))
    else:
        _rank(message)


TARGETS = (
    Target("host lists", lambda random: text(random, HOSTS), lambda hosts: compress(expand(hosts)), (HostlistError,)),
    Target("scheduler environments", variables, lambda environment: detect(environment, "n1"), (DetectionError,)),
    Target("control port messages", lambda random: octets(random, LINES), read_line, (ChannelLostError,)),
)
