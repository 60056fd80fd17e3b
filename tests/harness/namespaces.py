"""A cluster on one machine: nodes in Linux namespaces, joined by a cable that can be cut.

A node has a network, a host name, a process tree and an /etc/hosts of its own; the other files are
shared, as on a cluster. Nothing has a name outside (`ip netns` is not used). When a node's first
process ends, the kernel ends all others and takes back the cable; and that process reads a pipe
that closes when the test's own process ends, however that happens.
"""

import contextlib
import shutil
import subprocess
import sys

CABLE = "cable"
"""The interface that a node has beside `lo`."""
COMMANDS = ("unshare", "nsenter", "ip", "mount")
SPACES = ("--net", "--uts", "--mount")
UNSHARE = ("unshare", *SPACES, "--pid", "--fork", "--kill-child", "--mount-proc")

# A node's first process: names the host, lists all hosts, and waits for the end.
FIRST = """\
set -e
printf '%s\\n' "$1" >/proc/sys/kernel/hostname
mount --bind "$2" /etc/hosts
ip link set lo up
echo ready
exec cat
"""


def refusal():
    """Why nodes cannot be made here; None if they can."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        return f"{', '.join(missing)} not installed (iproute2, util-linux)"
    probe = [*UNSHARE, "ip", "link", "add", CABLE, "type", "veth", "peer", "name", "other"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    return f"no namespaces here: {done.stderr.strip()[-200:]}" if done.returncode else None


class Node:
    """A host; `end` it.

    Args:
        name: of the host.
        hosts: its /etc/hosts.
    """

    def __init__(self, name, hosts):
        self.name = name
        self._first = subprocess.Popen(
            [*UNSHARE, "sh", "-c", FIRST, "first", name, str(hosts)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self._first.stdout.readline() != "ready\n":
            self.end()
            raise RuntimeError(f"node {name} has not started")

    @property
    def pid(self):
        """A process whose network is the node's."""
        return self._first.pid

    def inside(self, *command):
        """The command line that runs `command` in the node, in the folder where that was made."""
        # A process is never in the namespace that it made for the processes it starts.
        pids = f"--pid=/proc/{self.pid}/ns/pid_for_children"
        return ["nsenter", "--target", str(self.pid), *SPACES, pids, "--wd", *command]

    def do(self, *command):
        """Runs `command` in the node; returns what it wrote."""
        done = subprocess.run(
            self.inside(*command), check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout

    def cut(self):
        """Takes the node off the network: what is sent goes nowhere, and nobody is told."""
        self.do("ip", "link", "set", CABLE, "down")

    def mend(self):
        """Brings it back."""
        self.do("ip", "link", "set", CABLE, "up")

    def end(self):
        """Ends every process of the node, and with the last of them its network."""
        try:
            self._first.communicate(timeout=10)  # closes its input
        except subprocess.TimeoutExpired:  # another process has its input open
            self._first.kill()
            self._first.communicate()


@contextlib.contextmanager
def two_nodes(folder):
    """Two hosts, `node-a` and `node-b`, that reach each other and nothing else.

    Args:
        folder: of their list of hosts.
    """
    addresses = {"node-a": "10.0.0.1", "node-b": "10.0.0.2"}
    hosts = folder / "hosts"
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    hosts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with contextlib.ExitStack() as ends:
        nodes = []
        for name in addresses:
            nodes.append(Node(name, hosts))
            ends.callback(nodes[-1].end)
        one, other = nodes
        cable = ["ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE]
        # From outside of the nodes' process trees, where both have a number.
        spaces = ["nsenter", "--target", str(one.pid), "--net"]
        subprocess.run([*spaces, *cable, "netns", str(other.pid)], check=True, timeout=60)
        for node in nodes:
            node.do("ip", "address", "add", f"{addresses[node.name]}/24", "dev", CABLE)
            node.do("ip", "link", "set", CABLE, "up")
        yield one, other
