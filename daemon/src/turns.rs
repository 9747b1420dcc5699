//! [`Turns`]: a queue of jobs for one thread, in which users take turns.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The jobs that wait, by user. Each user's are done in order, and the users take turns: a job takes up to tens of
/// milliseconds, and one user's backlog is not another's.
#[derive(Debug)]
struct Queue<J> {
    /// The jobs of this program itself are those of nobody.
    users: BTreeMap<Option<u32>, VecDeque<J>>,
    /// Users with jobs, the next one first.
    turns: VecDeque<Option<u32>>,
    ended: bool,
}

impl<J> Queue<J> {
    fn push(&mut self, user: Option<u32>, job: J) {
        let jobs = self.users.entry(user).or_default();
        if jobs.is_empty() {
            self.turns.push_back(user);
        }
        jobs.push_back(job);
    }

    fn pop(&mut self) -> Option<J> {
        let user = self.turns.pop_front()?;
        let jobs = self.users.get_mut(&user)?;
        let job = jobs.pop_front();
        if jobs.is_empty() {
            self.users.remove(&user);
        } else {
            self.turns.push_back(user);
        }
        job
    }
}

/// The outcome of a wait for a job.
#[derive(Debug)]
pub(crate) enum Next<J> {
    Job(J),
    /// None came in time.
    Nothing,
    /// There are no more.
    Ended,
}

/// The queue, and the bell of its thread.
#[derive(Debug)]
pub(crate) struct Turns<J> {
    queue: Mutex<Queue<J>>,
    more: Condvar,
}

impl<J> Default for Turns<J> {
    fn default() -> Self {
        let queue = Queue { users: BTreeMap::new(), turns: VecDeque::new(), ended: false };
        Self { queue: Mutex::new(queue), more: Condvar::new() }
    }
}

impl<J> Turns<J> {
    fn lock(&self) -> MutexGuard<'_, Queue<J>> {
        // A job is pushed or popped as a whole.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, user: Option<u32>, job: J) {
        self.lock().push(user, job);
        self.more.notify_one();
    }

    /// Jobs that wait.
    pub(crate) fn len(&self) -> usize {
        self.lock().users.values().map(VecDeque::len).sum()
    }

    /// Ends the thread after the jobs that wait.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.more.notify_one();
    }

    /// Waits for the next job; `None` when there are no more.
    pub(crate) fn next(&self) -> Option<J> {
        match self.wait(None) {
            Next::Job(job) => Some(job),
            Next::Nothing | Next::Ended => None,
        }
    }

    /// Waits for the next job, at most for `limit`.
    pub(crate) fn wait(&self, limit: Option<Duration>) -> Next<J> {
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.pop() {
                return Next::Job(job);
            }
            if queue.ended {
                return Next::Ended;
            }
            queue = match limit {
                None => self.more.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(limit) => {
                    let waited = self.more.wait_timeout(queue, limit);
                    let (queue, waited) = waited.unwrap_or_else(PoisonError::into_inner);
                    if waited.timed_out() && queue.turns.is_empty() && !queue.ended {
                        return Next::Nothing;
                    }
                    queue
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten jobs of one user delay another user's job by one.
    #[test]
    fn attack_users_take_turns() {
        let turns = Turns::default();
        (0..10).for_each(|job| turns.push(Some(7), job));
        turns.push(Some(8), 100);
        turns.push(None, 200);
        assert_eq!(turns.len(), 12);
        turns.end();
        let order: Vec<i32> = std::iter::from_fn(|| turns.next()).collect();
        assert_eq!(order, [0, 100, 200, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let queue = turns.lock();
        assert!(queue.users.is_empty() && queue.turns.is_empty());
    }
}
