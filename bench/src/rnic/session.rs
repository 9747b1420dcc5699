//! [`Session`]: the part of a test that one engine has, with a control connection and test connections of its own. The sessions of
//! several engines are made one after another, and their rows run in parallel.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    thread,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::json;
use xwarp_verbs::cm::{ConnectionRequest, ListenOptions, Listener};

use super::{
    control::{CONNECT_LIMIT, Control},
    endpoint::{Endpoint, next_request},
    links::Links,
    plan::Plan,
};

/// Version of the control connection's protocol.
const VERSION: u64 = 3;

/// One engine's connections.
#[derive(Debug)]
pub struct Session {
    /// Its control connection.
    pub control: Control,
    /// Its queue pairs.
    pub links: Links,
}

impl Session {
    /// Connects an engine of the client.
    fn connect(endpoint: &Endpoint, plan: &Plan, server: SocketAddr) -> Result<Self> {
        let mut control = Control::connect(endpoint, server)?;
        control.exchange(endpoint, &json!({ "version": VERSION, "plan": plan }))?;
        let links = Links::connect(endpoint, &mut control, &plan.part(), server)?;
        Ok(Self { control, links })
    }

    /// Accepts a client's engine, with the plan of the client.
    fn accept(
        endpoint: &Endpoint,
        listener: &Listener,
        request: ConnectionRequest,
        own: &Plan,
    ) -> Result<(Self, Plan)> {
        let mut control = Control::accept(endpoint, request)?;
        match agree(endpoint, &mut control, own) {
            Ok(plan) => {
                control.send(endpoint, &json!({ "ok": true }))?;
                let links = Links::accept(endpoint, &mut control, &plan.part(), listener)?;
                Ok((Self { control, links }, plan))
            }
            Err(error) => {
                // The client also prints the reason.
                control.send(endpoint, &json!({ "error": error.to_string() }))?;
                control.flush(endpoint)?;
                control.close()?;
                Err(error)
            }
        }
    }
}

fn agree(endpoint: &Endpoint, control: &mut Control, own: &Plan) -> Result<Plan> {
    let message = control.receive(endpoint)?;
    ensure!(
        message["version"] == VERSION,
        "the client has version {} of the control protocol, this server version {VERSION}",
        message["version"]
    );
    Plan::from_client(&message["plan"], own.test, own.engines)
}

/// Connects all engines of the client.
pub fn connect(endpoints: &[Endpoint], plan: &Plan, server: SocketAddr) -> Result<Vec<Session>> {
    endpoints.iter().map(|endpoint| Session::connect(endpoint, plan, server)).collect()
}

/// Listens, in all engines.
pub fn listen(endpoint: &Endpoint, source: Option<IpAddr>, port: u16, plan: &Plan) -> Result<Listener> {
    let address = SocketAddr::new(source.unwrap_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED)), port);
    let backlog = plan.queue_pairs as usize + 16;
    endpoint
        .device
        .listen(address, ListenOptions { backlog, ..ListenOptions::default() })
        .with_context(|| format!("cannot listen on {address}"))
}

/// Accepts all engines of a client, each at the engine where its request arrives. Returns them in the order of `endpoints`, and the
/// plan of the client.
pub fn accept(endpoints: &[Endpoint], listener: &Listener, own: &Plan) -> Result<(Vec<Session>, Plan)> {
    let mut sessions: Vec<Option<Session>> = endpoints.iter().map(|_| None).collect();
    let mut plan = None;
    for made in 0..endpoints.len() {
        let request = if made == 0 {
            next_request(listener)?
        } else {
            let left = endpoints.len() - made;
            let late = || format!("no connection of the client arrived on the queues of {left} engines");
            listener.accept(CONNECT_LIMIT).with_context(late)?
        };
        let number = usize::from(request.engine());
        let (endpoint, slot) =
            endpoints.get(number).zip(sessions.get_mut(number)).context("an engine that is ours")?;
        ensure!(slot.is_none(), "two engines of the client have sent to the queue of engine {number}");
        let (session, theirs) = Session::accept(endpoint, listener, request, own)?;
        *slot = Some(session);
        plan = Some(theirs);
    }
    Ok((sessions.into_iter().flatten().collect(), plan.context("a test without an engine")?))
}

/// Runs `work` for each engine: in this thread for one, in a thread each for several.
pub fn in_parallel<P: Send, T: Send>(parts: Vec<P>, work: impl Fn(P) -> Result<T> + Sync) -> Result<Vec<T>> {
    if parts.len() == 1 {
        return parts.into_iter().map(work).collect();
    }
    let work = &work;
    thread::scope(|scope| {
        let running: Vec<_> = parts.into_iter().map(|part| scope.spawn(move || work(part))).collect();
        // The scope waits for the others after an error.
        running
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("the thread of an engine panicked"))?)
            .collect()
    })
}
