//! The server: reads the client's text, writes it back.

use xwarp_verbs::{
    Access, Device,
    cm::{AcceptOptions, ListenOptions},
};

use crate::{
    Failure,
    arguments::Arguments,
    peer::{Advert, Peer, shown, text},
};

pub fn serve(device: &Device, arguments: &Arguments) -> Result<(), Failure> {
    let listener = device.listen(arguments.address, ListenOptions::default())?;
    println!("listening at {}", arguments.address);
    let mut request = listener.accept(arguments.limit)?;
    println!("{} asks, {} bytes of private data", request.peer_address(), request.private_data().len());
    if arguments.reject {
        request.reject(&arguments.private_data)?;
        return Ok(());
    }
    let mut peer = Peer::new(device, arguments.limit)?;
    let buffer = peer.pd.allocate(arguments.size, Access::LOCAL_WRITE)?;
    let options =
        AcceptOptions { private_data: arguments.private_data.clone(), ird: 1, ord: 1, ..Default::default() };
    let connection = request.accept(&peer.qp, options, arguments.limit)?;
    let mut rounds = 0;
    while let Some(source) = peer.receive()? {
        fits(arguments, source)?;
        peer.read(&buffer, source)?;
        let heard = buffer.to_vec(0, arguments.size)?;
        if heard != text(rounds, arguments.size) {
            return Err(format!("round {rounds}: data mismatch").into());
        }
        if arguments.verbose {
            println!("server ping data: {}", shown(&heard));
        }
        peer.send(Advert::default())?;
        let sink = peer.receive()?.ok_or("the client left in the middle of a round")?;
        fits(arguments, sink)?;
        peer.write(&buffer, sink)?;
        peer.send(Advert::default())?;
        rounds += 1;
    }
    println!("{rounds} rounds, the client disconnected");
    connection.wait_disconnected(arguments.limit)?;
    Ok(())
}

fn fits(arguments: &Arguments, advert: Advert) -> Result<(), Failure> {
    if advert.len as usize == arguments.size {
        return Ok(());
    }
    Err(format!("the client's buffer has {} bytes: -S must be the same at both ends", advert.len).into())
}
