//! `libxwarp-sdp.so`: connections of unmodified programs over SDP. `xwarp sdp -- PROGRAM` starts a program with it.
//!
//! The library takes the place of a few functions of the C library. A connection over SDP has three parts:
//!
//! ```text
//! program ── its socket ── loopback ── leg ── relay ── SdpStream ── network
//! ```
//!
//! The program keeps a TCP socket of the kernel, whose other end, the leg, belongs to this library in the same process. So every
//! call and option that works on a TCP socket works here, whatever waits for it: poll, epoll of every kind, signals, fork and
//! exec, with or without this library. What differs is set-up, and names:
//!
//! | call | what is different |
//! |---|---|
//! | `connect` | the port mapper of the host is asked; then SDP connects to the host, and the socket to the leg |
//! | `bind` | the library learns which sockets have a port of the program's choice, which only TCP can connect from |
//! | `listen` | an SDP listener and an entry of the port mapper are added; what it accepts, the relay brings to the socket |
//! | `accept`, `accept4`, `getsockname`, `getpeername` | the addresses are those of the connection over SDP |
//! | `read`, `write`, `recv`, `send` and their kin | in the process that made the connection, data goes straight from and to the stream when neither the loopback nor a sleep is in the way |
//! | `close`, `dup`, `fcntl`, `fdopen`, `posix_spawn` and their kin | the library learns which descriptors are the only ones of their socket |
//! | `_exit`, `_Exit`, exit handlers | data that is on its way is sent |
//!
//! | file | owns |
//! |---|---|
//! | `calls` | the functions that replace those of the C library |
//! | `descriptors` | the functions that replace those which close, duplicate or pass on descriptors |
//! | `direct` | reads and writes that pass the loopback by |
//! | `incoming` | memory of long pieces on their way to the program |
//! | `locks` | locks that a call of the program may find left behind |
//! | `loopback` | the length of the loopback |
//! | `next` | the functions of the C library that are replaced |
//! | `numbers` | which numbers the library's descriptors have |
//! | `outgoing` | memory of long pieces on their way to the network |
//! | `tracking` | which descriptors are the only ones of their socket |
//! | `transfers` | the functions that replace those that transfer data |
//! | `sys` | system calls, past those functions, and hooks of the C library |
//! | `legs` | names of connections, in memory that is shared with forked children |
//! | `process` | rules, devices, listeners of this process |
//! | `relay` | copying between a leg and a stream |
//!
//! [Decision 17](../../docs/decisions/0017-programs-keep-their-tcp-sockets.md) says why, and what it costs.

mod calls;
mod descriptors;
mod direct;
mod incoming;
mod legs;
mod locks;
mod loopback;
mod next;
mod numbers;
mod outgoing;
mod process;
mod relay;
mod sys;
mod tracking;
mod transfers;
