"""What a program tries in order to leave its sandbox. Each attack succeeds outside of one.

An attack raises OSError if it is refused. Names that it finds: `victim`, a process of the user; `private`, a file that
only the user can open; `shared`, a folder of the user; `datagrams`, the address of a socket that anybody may write to.
"""

HEAD = """
import ctypes, fcntl, mmap, os, resource, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def system_call(x86_64, aarch64, *arguments):
    call("syscall", x86_64 if os.uname().machine == "x86_64" else aarch64, *arguments)

def keep(make, remove, *arguments):
    identifier = getattr(libc, make)(*arguments)
    if identifier < 0:
        raise OSError(ctypes.get_errno(), make)
    call(remove, identifier, 0, 0)

def write_parameters():
    opened = 0
    for folder, _, names in os.walk("/proc/sys"):
        for name in names:
            try:
                os.close(os.open(os.path.join(folder, name), os.O_WRONLY))
                opened += 1
            except OSError:
                pass
    if not opened:
        raise OSError("no parameter can be written")

def detached_thread():
    # It shares memory and signals only, and waits.
    stack = (ctypes.c_char * 2**16)()
    top = ctypes.addressof(stack) + 2**15 & ~15
    ctypes.c_void_p.from_address(top).value = ctypes.cast(libc.pause, ctypes.c_void_p).value
    system_call(56, 220, 0x10900, ctypes.c_void_p(top), 0, 0, 0)
    print("escaped", end="", flush=True)
    os._exit(0)

def attack(name):
    try:
        exec(ATTACKS[name], globals())
        print("escaped", end="")
    except (OSError, ValueError) as error:
        print("refused", end="")
"""

ATTACKS = {
    # other machines and processes
    "open a socket": "socket.socket()",
    "open a local socket": "socket.socket(socket.AF_UNIX)",
    "send a datagram from a pair": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', datagrams)",
    "fork": "os.fork() or os._exit(0)",
    "fork twice": "os.fork() or os.setsid() or os.fork() or os._exit(0)",
    "vfork": "os.posix_spawn('/bin/true', ['true'], {})",
    "become another program": "os.execv('/bin/echo', ['echo', '-n', 'escaped'])",
    "outlive the parent": "call('prctl', 1, 0, 0, 0, 0)",
    "leave the session": "os.setsid()",
    "signal the parent": "os.kill(os.getppid(), 0)",
    "signal another process": "os.kill(victim, 0)",
    "signal all": "os.kill(-1, 0)",
    "signal the group": "os.kill(0, 0)",
    "queue a signal": "call('sigqueue', victim, 0, 0)",
    "signal by descriptor": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, victim)",
    "signal by ioctl": "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', victim))",
    "open a process": "os.pidfd_open(victim)",
    "be traced": "call('ptrace', 0, 0, 0, 0)",
    "read the parent's memory": "open(f'/proc/{os.getppid()}/mem', 'rb')",
    "write the parent's memory": "open(f'/proc/{os.getppid()}/mem', 'r+b')",
    "read a process's memory": "open(f'/proc/{victim}/mem', 'rb')",
    "read a process's environment": "open(f'/proc/{victim}/environ').read()",
    "read a process's limits": "resource.prlimit(victim, resource.RLIMIT_CPU)",
    "set a process's limits": "resource.prlimit(victim, resource.RLIMIT_CORE, (0, 0))",
    "set a process's cores": "os.sched_setaffinity(victim, os.sched_getaffinity(victim))",
    "set a process's priority": "os.setpriority(os.PRIO_PROCESS, victim, 0)",
    # files
    "read a private file": "open(private).read()",
    "append to a private file": "open(private, 'a')",
    "cut a private file": "os.truncate(private, 0)",
    "cut a private file by opening it": "os.open(private, os.O_RDONLY | os.O_TRUNC)",
    "show a private file": "os.chmod(private, 0o644)",
    "touch a private file": "os.utime(private)",
    "move a private file": "os.rename(private, shared + '/moved'); os.rename(shared + '/moved', private)",
    "link to a private file": "os.symlink(private, 'link')",
    "link a private file": "os.link(private, shared + '/linked')",
    "write elsewhere": "open(shared + '/written', 'w')",
    "write to /tmp": "open('/tmp/slipway-attack', 'w'); os.remove('/tmp/slipway-attack')",
    "write to /dev/shm": "open('/dev/shm/slipway-attack', 'w'); os.remove('/dev/shm/slipway-attack')",
    "set the kernel's parameters": "write_parameters()",
    "make a folder elsewhere": "os.mkdir(shared + '/folder')",
    "make a folder that cannot be listed": "os.mkdir('unlisted', 0o300)",
    "make a named pipe": "os.mkfifo('pipe')",
    "change the mask of modes": "os.umask(0o700)",
    "keep descriptors of a thread's own": "detached_thread()",
    # memory that no limit of a process counts, or that outlives it
    "share memory": "keep('shmget', 'shmctl', 0, 2**20, 0o1600)",
    "queue messages": "keep('msgget', 'msgctl', 0, 0o1600)",
    "make semaphores": "keep('semget', 'semctl', 0, 1, 0o1600)",
    "queue POSIX messages": "call('mq_open', b'/slipway', 0o102, 0o600, None); call('mq_unlink', b'/slipway')",
    "make a file in memory": "os.memfd_create('attack')",
    "keep a key": "system_call(248, 217, b'user', b'slipway-attack', b'x', 1, -2)",
    "watch files": "call('inotify_init1', 0)",
    "set timers": "call('timer_create', 0, None, ctypes.byref(ctypes.c_void_p()))",
    "queue input and output": "system_call(206, 0, 1, ctypes.byref(ctypes.c_ulong()))",
    "send descriptors": "pair = socket.socketpair(); socket.send_fds(pair[0], [b'x'], [0])",
    "widen a pipe": "fcntl.fcntl(os.pipe()[0], 1031, 2**20)",
    "widen a socket": "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)",
    # the kernel
    "leave what is shared": "call('unshare', 0x400)",
    "change the personality": "call('personality', 0)",
}

# What nothing hides from the programs of a user without bubblewrap and without Landlock.
READING = ("read a private file", "read a process's environment", "read a process's memory")


def attacker(victim: str, private: str, shared: str, datagrams: str) -> str:
    """A program that makes the attack which it reads."""
    names = {"victim": victim, "private": repr(private), "shared": repr(shared), "datagrams": repr(datagrams)}
    given = "".join(f"{name} = {value}\n" for name, value in names.items())
    return f"{HEAD}\n{given}\nATTACKS = {ATTACKS!r}\nattack(input())"
