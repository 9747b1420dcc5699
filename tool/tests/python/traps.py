"""Descriptors that change hands by any call keep their bytes.

    python3 traps.py serve|call ADDRESS PORT
"""
import array, ctypes, os, socket, subprocess, sys, tempfile, threading, time
role, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
# By the names that the program itself would use, not those of the C library alone.
libc = ctypes.CDLL(None, use_errno=True)
libc.fdopen.restype = ctypes.c_void_p
libc.fclose.argtypes = [ctypes.c_void_p]
libc.syscall.restype = ctypes.c_long
SYS_write, SYS_close = (1, 3) if os.uname().machine == 'x86_64' else (64, 57)
SYS_io_uring_setup, SYS_close_range = 425, 436
TURNS = 200

def received(i):
    return sys.argv[0] + '.' + str(i)

def word(i):
    return b'%07d ' % i

def exactly(s, n):
    data = b''
    while len(data) < n:
        data += s.recv(n - len(data)) or exit('the stream has ended')
    return data

class Connection:
    count = 0

    def __init__(self):
        self.s = socket.create_connection((host, port))
        # Requests and answers: what goes straight to the stream.
        for i in range(20):
            self.s.sendall(word(i))
            assert exactly(self.s, 8) == word(i)
        self.s.sendall(b'no echo ')
        self.fd = self.s.fileno()
        self.index = Connection.count
        Connection.count += 1

    def check(self, expected):
        path = received(self.index)
        while not os.path.exists(path):
            time.sleep(0.01)
        with open(path, 'rb') as file:
            got = file.read()
        assert got == expected, (self.index, len(got), len(expected), got[:200])

def replaced(close):
    'Closes a connection by `close`; another file gets its number.'
    c = Connection()
    fd = c.s.detach()
    os.write(fd, b'before')
    path = sys.argv[0] + '.other'
    close(fd)
    other = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    if other != fd:
        os.dup2(other, fd)
        os.close(other)
    os.write(fd, b'for the file')
    os.lseek(fd, 0, os.SEEK_SET)
    assert os.read(fd, 100) == b'for the file'
    os.close(fd)
    c.check(b'before')

def alternate(other_writes):
    'Writes in turn with somebody else.'
    c = Connection()
    with other_writes(c) as write:
        for i in range(TURNS):
            os.write(c.fd, word(2 * i))
            write(word(2 * i + 1))
    c.s.close()
    c.check(b''.join(word(i) for i in range(2 * TURNS)))

class By:
    'Writes by a function.'
    def __init__(self, write, end=lambda: None):
        self.write, self.end = write, end

    def __enter__(self):
        return self.write

    def __exit__(self, *error):
        self.end()

def by_copy(c):
    copy = os.dup(c.fd)
    return By(lambda data: os.write(copy, data), lambda: os.close(copy))

def by_system_call(c):
    return By(lambda data: libc.syscall(SYS_write, c.fd, data, len(data)))

def by_dprintf(c):
    return By(lambda data: libc.dprintf(c.fd, b'%07d ', int(data)))

def by_file(c):
    file = libc.fdopen(os.dup(c.fd), b'w')
    libc.fputs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    libc.fflush.argtypes = [ctypes.c_void_p]
    def write(data):
        libc.fputs(data, file)
        libc.fflush(file)
    return By(write, lambda: libc.fclose(file))

def by_same_file(c):
    file = libc.fdopen(c.fd, b'w')
    libc.fputs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    libc.fflush.argtypes = [ctypes.c_void_p]
    def write(data):
        libc.fputs(data, file)
        libc.fflush(file)
    return By(write)

def by_fork(c):
    turn, done = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        turn.close()
        while True:
            data = done.recv(8)
            if not data:
                os._exit(0)
            os.write(c.fd, data)
            done.send(b'd')
    done.close()
    def write(data):
        turn.send(data)
        assert turn.recv(1) == b'd'
    def end():
        turn.close()
        assert os.waitpid(pid, 0)[1] == 0
    return By(write, end)

def by_passing(c):
    # The child was forked before the connection was made.
    helper.sendmsg([b'f'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [c.fd]))])
    def write(data):
        helper.send(data)
        assert helper.recv(1) == b'd'
    def end():
        helper.send(b'x')
        assert helper.recv(1) == b'c'
    return By(write, end)

def by_children(c):
    return By(lambda data: subprocess.run(['printf', '%s', data.decode()], stdout=c.fd, check=True))

def by_spawn(c):
    def write(data):
        actions = [(os.POSIX_SPAWN_DUP2, c.fd, 1)]
        pid = os.posix_spawn('/usr/bin/printf', ['printf', '%s', data.decode()], os.environ, file_actions=actions)
        assert os.waitpid(pid, 0)[1] == 0
    return By(write)

def by_io_uring_setup(c):
    libc.syscall(SYS_io_uring_setup, 4, ctypes.create_string_buffer(200))
    return By(lambda data: os.write(c.fd, data))

def raced(replace):
    'Another thread writes while the connection is closed or replaced.'
    c = Connection()
    fd = c.s.detach()
    written, replacement, begun = 0, bytes(64), threading.Event()
    def run():
        nonlocal written
        try:
            while not over.is_set() and written < 100000:
                written += os.write(fd, replacement)
                begun.set()
        except OSError as error:
            assert error.errno in (9, 32), error
    over = threading.Event()
    writer = threading.Thread(target=run)
    writer.start()
    begun.wait()
    time.sleep(0.003)
    stray = replace(fd)
    time.sleep(0.003)
    over.set()
    writer.join()
    c.check(bytes(written - stray()))

def close_it(fd):
    os.close(fd)
    return lambda: 0

def replace_it(fd):
    path = sys.argv[0] + '.stray'
    other = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(other, fd)
    os.close(other)
    def stray():
        os.close(fd)
        return os.path.getsize(path)
    return stray

if role == 'serve':
    listener = socket.create_server((host, port), backlog=16)
    i = 0
    while True:
        s, _ = listener.accept()
        while (data := exactly(s, 8)) not in (b'no echo ', b'the end '):
            s.sendall(data)
        if data == b'the end ':
            break
        content = b''
        while data := s.recv(1 << 16):
            content += data
        with open(received(i) + '.new', 'wb') as file:
            file.write(content)
        os.rename(received(i) + '.new', received(i))
        i += 1
else:
    helper, far = socket.socketpair()
    if os.fork() == 0:
        helper.close()
        while True:
            data, passed, _, _ = far.recvmsg(8, 64)
            if not data:
                os._exit(0)
            if data == b'f':
                fd = array.array('i', passed[0][2])[0]
            elif data == b'x':
                os.close(fd)
                far.send(b'c')
            else:
                os.write(fd, data)
                far.send(b'd')
    far.close()
    for close in [
        os.close,
        lambda fd: libc.fclose(libc.fdopen(fd, b'r+')),
        lambda fd: libc.close_range(fd, fd, 0),
        lambda fd: libc.syscall(SYS_close, fd),
        lambda fd: libc.syscall(SYS_close_range, fd, fd, 0),
        lambda fd: os.dup2(0, fd),
        lambda fd: libc.dup3(0, fd, 0),
    ]:
        replaced(close)
    for way in [by_passing, by_copy, by_system_call, by_dprintf, by_file, by_same_file, by_fork]:
        alternate(way)
    TURNS = 5
    alternate(by_children)
    alternate(by_spawn)
    for i in range(5):
        raced(close_it)
        raced(replace_it)
    # Calls wait, or not, as the program has last said.
    c = Connection()
    for i in range(100):
        c.s.setblocking(i % 2 == 0)
        if i % 2:
            try:
                c.s.recv(1)
                raise AssertionError('received')
            except BlockingIOError:
                pass
        os.write(c.fd, word(i))
    c.s.shutdown(socket.SHUT_WR)
    try:
        os.write(c.fd, b'late')
        raise AssertionError('written')
    except BrokenPipeError:
        pass
    c.check(b''.join(word(i) for i in range(100)))
    # Nothing is tracked after this.
    TURNS = 200
    alternate(by_io_uring_setup)
    last = socket.create_connection((host, port))
    last.sendall(b'the end ')
print('all is well', flush=True)
