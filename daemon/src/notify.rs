//! Tells systemd that the helper serves (`Type=notify`, `sd_notify(3)`).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Says so, if systemd has started this program.
pub(crate) fn ready() {
    if let Some(name) = std::env::var_os("NOTIFY_SOCKET")
        && let Err(error) = send(&name, b"READY=1")
    {
        tracing::warn!(%error, "systemd does not hear that xwarpd is ready");
    }
}

fn send(name: &OsStr, state: &[u8]) -> io::Result<()> {
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state, &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemd_hears_it_at_a_path_and_at_an_abstract_name() {
        let directory = std::env::temp_dir().join(format!("xwarpd-notify-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("socket");
        let abstract_name = format!("xwarpd-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&abstract_name).unwrap();
        let listeners = [
            (UnixDatagram::bind(&path).unwrap(), path.clone().into_os_string()),
            (UnixDatagram::bind_addr(&address).unwrap(), format!("@{abstract_name}").into()),
        ];
        for (listener, name) in listeners {
            send(&name, b"READY=1").unwrap();
            let mut heard = [0; 16];
            let len = listener.recv(&mut heard).unwrap();
            assert_eq!(&heard[..len], b"READY=1");
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
