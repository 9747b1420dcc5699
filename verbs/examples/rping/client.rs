//! The client: shows a text, and looks whether the same comes back.

use std::thread;

use xwarp_verbs::{Access, Device, cm::ConnectOptions};

use crate::{
    Failure,
    arguments::Arguments,
    peer::{Peer, shown, text},
};

pub fn ping(device: &Device, arguments: &Arguments) -> Result<(), Failure> {
    let mut peer = Peer::new(device, arguments.limit)?;
    let source = peer.pd.allocate(arguments.size, Access::REMOTE_READ)?;
    let sink = peer.pd.allocate(arguments.size, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let options = ConnectOptions {
        private_data: arguments.private_data.clone(),
        ird: 1,
        ord: 1,
        ..ConnectOptions::default()
    };
    let connection = device.connect(&peer.qp, arguments.address, options, arguments.limit)?;
    println!("connected, {} bytes of private data", connection.private_data().len());
    thread::sleep(arguments.pause);
    for round in 0..arguments.count {
        let said = text(round, arguments.size);
        source.write(0, &said)?;
        peer.advertise(&source)?;
        peer.receive()?.ok_or("the server left in the middle of a round")?;
        peer.advertise(&sink)?;
        peer.receive()?.ok_or("the server left in the middle of a round")?;
        let heard = sink.to_vec(0, arguments.size)?;
        if heard != said {
            return Err(format!("round {round}: data mismatch").into());
        }
        sink.write(0, &vec![0; arguments.size])?;
        if arguments.verbose {
            println!("ping data: {}", shown(&heard));
        }
    }
    println!("{} rounds", arguments.count);
    if arguments.abort {
        peer.qp.abort()?;
    } else {
        connection.disconnect()?;
    }
    if !connection.wait_disconnected(arguments.limit)? {
        return Err("the server does not close its end".into());
    }
    Ok(())
}
