//! A single store of records: every request is a step on the stored content of its locks.

use std::{collections::BTreeMap, time::Duration};

use super::{Broken, dice::Dice, process::Message, server::execute_one};
use crate::{
    protocol::{self, majority},
    shell::time::Instant,
    store::{
        KeyRequest, RevokeScope, StoreEvent, Token,
        records::sim::{
            Body, Caused, Lock, Now, Origin, Outcome, Passed, Record, Terms, Timestamp, Writes,
            evaluate,
        },
        table::{Step, Table, acquire_all},
    },
};

/// A time that is later than any deadline.
const NEVER: Duration = Duration::from_secs(100 * 24 * 60 * 60);

type Records = BTreeMap<String, (Lock, Record)>;

#[derive(Clone, Default)]
pub(super) struct Stored {
    records: Records,
    /// The states to which a crash may return, from the last durable change on.
    earlier: Vec<Records>,
}

impl Stored {
    /// Executes a request, and adds its events to `step`.
    pub(super) fn execute(
        &mut self,
        message: &Message,
        caller: Option<Token>,
        now: Now,
        broken: Option<Broken>,
        step: &mut Step<'_>,
    ) -> majority::Reply {
        let locks = locks(message);
        let found = locks
            .iter()
            .map(|lock| self.records.get(lock.name.as_str()));
        let found: Vec<_> = found
            .map(|it| it.map(|(_, record)| record.clone()))
            .collect();
        let is_abandon = matches!(message, Message::One(protocol::Request::Abandon(_)));
        let terms = Terms {
            now,
            caller,
            is_guarded: false,
            writes: match message {
                Message::Revoke(..) => Writes::Durably,
                _ if is_abandon => Writes::Always,
                _ => Writes::Changes,
            },
        };
        let at = step.now;
        let rule = |table: &mut Table, step: &mut Step<'_>| rule(message, at, table, step);
        let evaluation = evaluate(&locks, &found, &terms, rule).expect("the format is known");
        if let Some(swap) = evaluation.swap {
            let hands_off = |it: &Caused| matches!(it.event, StoreEvent::Granted { .. });
            let is_durable = swap.durable
                && broken != Some(Broken::NothingDurable)
                && !(broken == Some(Broken::UndoesHandOffs)
                    && evaluation.events.iter().any(hands_off));
            if is_durable {
                self.earlier.clear();
            } else {
                self.earlier.push(self.records.clone());
            }
            for change in swap.changes {
                let mut locks = locks.iter();
                let lock = locks.find(|lock| lock.name == change.name);
                let lock = lock.expect("a change of one of the locks").clone();
                let name = change.name.as_str().to_owned();
                self.records.insert(name, (lock, change.record));
            }
        }
        let at_most = match broken {
            Some(Broken::KnowsTheTime) => Duration::ZERO,
            _ => now.unsure,
        };
        let passed = Passed {
            at_least: Duration::ZERO,
            at_most,
        };
        for mut caused in evaluation.events {
            if let StoreEvent::Granted { grant, .. } = &mut caused.event {
                grant.shorten(passed);
            }
            step.events.push(caused.event);
        }
        shortened(evaluation.outcome, passed)
    }

    /// Returns to an earlier state.
    pub(super) fn undo(&mut self, dice: &mut Dice) {
        if !self.earlier.is_empty() {
            let kept = dice.below(self.earlier.len());
            self.records = self.earlier.swap_remove(kept);
            self.earlier.truncate(kept);
        }
    }

    /// Returns the locks in the form in which the checker examines them.
    pub(super) fn table(&self, start: Instant, epoch: u64) -> Table {
        let mut table = Table::default();
        for (lock, record) in self.records.values() {
            let body = Body::read(&lock.name, &record.body).expect("the format is known");
            if let Some(entry) = body.entry(Origin::at(start, epoch)) {
                table.insert(&lock.key, lock.kind, entry);
            }
        }
        table
    }
}

/// Returns a time within bounds that are up to `doubt` away from the time of the clock.
pub(super) fn now(micros: u64, doubt: Duration, dice: &mut Dice) -> Now {
    let true_time = Timestamp::from_micros(micros);
    let reached = true_time.earlier(dice.up_to(doubt));
    let latest = true_time.later(dice.up_to(doubt));
    Now {
        reached,
        latest,
        unsure: latest.since(reached),
    }
}

fn shortened(mut reply: majority::Reply, by: Passed) -> majority::Reply {
    use majority::Reply;
    match &mut reply {
        Reply::Acquire(reply) => reply.shorten(by),
        Reply::AcquireAll(reply) => reply.shorten(by),
        Reply::Poll(reply) => reply.shorten(by),
        Reply::Renew(replies) => replies.iter_mut().flatten().for_each(|it| it.shorten(by)),
        Reply::Release(reply) => reply.shorten(by),
        Reply::Convert(reply) => reply.shorten(by),
        Reply::Inspect(inspection) => inspection.shorten(by),
        Reply::Raise(..) | Reply::Abandoned | Reply::NotAbandoned(..) | Reply::Revoke(_) => {}
    }
    reply
}

/// Handles an event that was sent this long ago.
pub(super) fn read_late(event: &mut StoreEvent, late: Duration) {
    match event {
        StoreEvent::Granted { grant, .. } => grant.ttl = grant.ttl.saturating_sub(late),
        StoreEvent::FreeIn { ttl, .. } => *ttl = ttl.saturating_sub(late),
        _ => {}
    }
}

fn locks(message: &Message) -> Vec<Lock> {
    use protocol::Request;
    let hold = match message {
        Message::All(requests) => {
            let lock = |it: &KeyRequest| Lock::new(&it.hold.key, it.hold.mode.kind());
            return requests.iter().map(lock).collect();
        }
        Message::Revoke(key, kind) => return vec![Lock::new(key, *kind)],
        Message::One(request) => match request {
            Request::Acquire(request) => &request.hold,
            Request::Release(release) => &release.hold,
            Request::Renew(renewal) => &renewal.hold,
            Request::Poll(hold) | Request::Abandon(hold) | Request::Convert(hold) => hold,
        },
    };
    vec![Lock::new(&hold.key, hold.mode.kind())]
}

/// Applies a request to locks. `now` is the time by the clock of its deadline.
fn rule(
    message: &Message,
    now: Instant,
    table: &mut Table,
    step: &mut Step<'_>,
) -> majority::Reply {
    // The clock of the table has another origin.
    let timely = |request: &KeyRequest, step: &Step<'_>| KeyRequest {
        deadline: if now > request.deadline {
            step.now - Duration::from_nanos(1)
        } else {
            step.now + NEVER
        },
        ..request.clone()
    };
    match message {
        Message::One(protocol::Request::Acquire(request)) => {
            majority::Reply::Acquire(table.acquire(&timely(request, step), step))
        }
        Message::One(request) => execute_one(table, request, None, step),
        Message::All(requests) => {
            let requests: Vec<_> = requests.iter().map(|it| timely(it, step)).collect();
            majority::Reply::AcquireAll(acquire_all(&mut [table], |_| 0, &requests, step))
        }
        Message::Revoke(key, kind) => {
            majority::Reply::Revoke(table.revoke(key, *kind, RevokeScope::Leased, step))
        }
    }
}
