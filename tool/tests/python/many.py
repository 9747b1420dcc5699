"""Thousands of connections at a time, and more in turn, keep their bytes and names.

    python3 many.py serve|call ADDRESS PORT
"""
import resource, select, socket, sys
role, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
AT_ONCE, LATER = 2000, 1500

def exactly(s, n):
    data = b''
    while len(data) < n:
        data += s.recv(n - len(data)) or exit('the stream has ended')
    return data

def word(i):
    return b'%07d ' % i

def echo(s, i):
    s.sendall(word(i))
    assert exactly(s, 8) == word(i), i

if role == 'serve':
    listener = socket.create_server((host, port), backlog=4096)
    epoll, sockets, ended = select.epoll(), {}, 0
    epoll.register(listener, select.EPOLLIN)
    while ended < AT_ONCE + LATER:
        for fd, event in epoll.poll(50):
            if fd == listener.fileno():
                s, peer = listener.accept()
                assert s.getpeername() == peer
                sockets[s.fileno()] = s, peer
                epoll.register(s, select.EPOLLIN)
                continue
            s, peer = sockets[fd]
            data = s.recv(1000)
            if data:
                s.sendall(data)
            else:
                epoll.unregister(fd)
                sockets.pop(fd)[0].close()
                ended += 1
else:
    sockets = [socket.create_connection((host, port)) for i in range(AT_ONCE)]
    for turn in range(2):
        for i, s in enumerate(sockets):
            s.sendall(word(i + turn))
        for i, s in enumerate(sockets):
            assert exactly(s, 8) == word(i + turn), i
    for s in sockets[1000:]:
        s.close()
    del sockets[1000:]
    for i in range(LATER):
        s = socket.create_connection((host, port))
        echo(s, i)
        s.close()
    assert {s.getpeername() for s in sockets} == {(host, port)}
    assert len({s.getsockname()[0] for s in sockets}) == 1 and sockets[0].getsockname()[0] != '127.0.0.1'
    for i, s in enumerate(sockets):
        echo(s, i)
        s.close()
print('all is well', flush=True)
