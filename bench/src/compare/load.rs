//! [`Load`]: other work on the processors of a measurement.

use std::{
    hint,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result};

use crate::cpu;

/// Busy loops on each CPU.
const LOOPS: usize = 2;

/// Busy loops on the CPUs of both ends, until this is dropped.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    pub(super) fn start(cpus: (usize, usize)) -> Result<Self> {
        let mut load = Self { stop: Arc::default(), threads: Vec::new() };
        for cpu in [cpus.0, cpus.1].into_iter().flat_map(|cpu| [cpu; LOOPS]) {
            let stop = Arc::clone(&load.stop);
            let spin = move || {
                // A thread that cannot be pinned runs somewhere: it is work as well.
                _ = cpu::pin(cpu);
                while !stop.load(Ordering::Relaxed) {
                    hint::spin_loop();
                }
            };
            load.threads.push(thread::Builder::new().spawn(spin).context("cannot start a busy loop")?);
        }
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            _ = thread.join();
        }
    }
}
