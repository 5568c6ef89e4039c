//! A store that executes one step at a time.

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use lock_runtime::{
    FencingToken, LockKey, LockKind, Mode,
    operator::Inspection,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Grant, Hold, KeyRequest, NextHolder,
        PollReply, Release, ReleaseReply, RenewReply, Renewal, RevokeScope, Store, StoreError,
        Token,
    },
    time::Instant,
};

use super::{
    answer::{Answer, Granted, Units},
    step::Step,
};
use crate::subject::one;

/// The time by which a delayed request is late.
const LATE: Duration = Duration::from_secs(5);
/// The shortest time after which a call may have had no answer in time.
const SLOW: Duration = Duration::from_millis(250);
/// The time until the deadline of any other request.
const AHEAD: Duration = Duration::from_secs(3600);

/// One of the two stores, and the fencing tokens that it has returned.
pub(super) struct Side {
    store: Arc<dyn Store>,
    unit: Duration,
    latest: HashMap<(LockKey, LockKind), (FencingToken, Token)>,
    of_holds: HashMap<Hold, FencingToken>,
    /// The fencing token of each result. No two results are equal.
    of_results: HashMap<Vec<u8>, FencingToken>,
    /// Whether it keeps the latest fencing token of a key also while the key has no holder.
    remembers: bool,
}

/// A reply, or the description of a reply that no store may ever give.
type Reply = Result<Answer, String>;

/// A reply that answers no request of a sequence.
fn unknown(reply: &impl fmt::Debug) -> Reply {
    Err(format!("{reply:?} is no answer"))
}

impl Side {
    pub(super) fn new(store: Arc<dyn Store>, unit: Duration) -> Self {
        Self {
            store,
            unit,
            latest: HashMap::new(),
            of_holds: HashMap::new(),
            of_results: HashMap::new(),
            remembers: false,
        }
    }

    pub(super) fn remembering(self, remembers: bool) -> Self {
        Self { remembers, ..self }
    }

    /// Executes a step. An error describes a reply that no store may ever give.
    pub(super) async fn take(&mut self, step: &Step) -> Reply {
        let begun = std::time::Instant::now();
        self.ask(step).await.unwrap_or_else(|error| {
            // An error at once is that of the store, and not of a slow machine.
            Ok(if error.is_transient() && begun.elapsed() >= SLOW {
                Answer::Unanswered
            } else {
                Answer::Failed(error.to_string())
            })
        })
    }

    async fn ask(&mut self, step: &Step) -> Result<Reply, StoreError> {
        let store = self.store.clone();
        Ok(match step {
            Step::Acquire {
                hold,
                lease,
                late,
                queue,
                reserved,
            } => {
                let request = KeyRequest::new(hold.clone(), *lease, deadline(*late));
                let request = request.reserved(*reserved);
                let request = if *queue { request.queued() } else { request };
                let reply = store.acquire(&request).await?;
                self.acquired(hold, reply)
            }
            Step::AcquireAll { holds, lease } => self.acquire_all(holds, *lease).await?,
            Step::Poll(hold) => match one(store.poll(std::slice::from_ref(hold)).await)? {
                PollReply::Granted(grant) => self.granted(hold, grant).map(Answer::Granted),
                PollReply::Gone => Ok(Answer::Gone),
                PollReply::Done(done) => Ok(Answer::IsDone(done.value.clone())),
                PollReply::Queued {
                    counter,
                    holder_ttl,
                } => self.queued(hold, counter, holder_ttl),
                reply => unknown(&reply),
            },
            Step::Renew(renewals) => self.renew(renewals).await?,
            Step::Release {
                hold,
                keep_for,
                next,
            } => {
                let release = Release::new(hold.clone()).keep_for(*keep_for);
                let release = match next {
                    Some(next) => release.next(*next),
                    None => release,
                };
                let reply = store.release(&release).await?;
                self.released(hold, *next, reply)
            }
            Step::Complete {
                hold,
                keep_for,
                result,
            } => {
                // That of a hold that was never granted is refused, whatever its number.
                let fence = self.of_holds.get(hold).copied();
                let fence = fence.or(FencingToken::new(1)).expect("a number");
                self.of_results.insert(result.clone(), fence);
                let release = Release::new(hold.clone()).keep_for(Some(*keep_for));
                let release = release.result(Some((fence, result[..].into())));
                let reply = store.release(&release).await?;
                self.released(hold, None, reply)
            }
            Step::Look(key) => Ok(match store.done(key).await? {
                Some(done) => {
                    let is_its_own = self.of_results.get(&done.value) == Some(&done.fence);
                    Answer::Result(done.value, is_its_own)
                }
                None => Answer::NoResult,
            }),
            Step::Forget(key) => Ok(match store.done(key).await? {
                Some(done) => {
                    let scope = RevokeScope::Holder(done.id);
                    Answer::Revocation(store.revoke(key, LockKind::Lock, scope).await?)
                }
                None => Answer::NoResult,
            }),
            Step::Convert(hold) => match store.convert(hold).await? {
                ConvertReply::Converted(grant) => {
                    let hold = Hold::new(hold.key.clone(), Mode::Shared, hold.token);
                    self.granted(&hold, grant).map(Answer::Converted)
                }
                ConvertReply::NotHeld => Ok(Answer::NotHeld),
                reply => unknown(&reply),
            },
            Step::Abandon(hold) => {
                // A token that is used again begins anew.
                self.of_holds.remove(hold);
                store.abandon(hold).await.map(|()| Ok(Answer::Done))?
            }
            Step::Inspect(key, kind) => {
                self.inspected(key, *kind, store.inspect(key, *kind).await?)
            }
            Step::Revoke(key, kind, scope) => {
                Ok(Answer::Revocation(store.revoke(key, *kind, *scope).await?))
            }
        })
    }

    async fn acquire_all(&mut self, holds: &[Hold], lease: Duration) -> Result<Reply, StoreError> {
        let request = |hold: &Hold| KeyRequest::new(hold.clone(), lease, deadline(false));
        let requests: Vec<_> = holds.iter().map(request).collect();
        Ok(match self.store.acquire_all(&requests).await? {
            AcquireAllReply::Granted(grants) if grants.len() == holds.len() => {
                let granted =
                    (holds.iter().zip(grants)).map(|(hold, grant)| self.granted(hold, grant));
                granted.collect::<Result<_, _>>().map(Answer::AllGranted)
            }
            AcquireAllReply::Refused { index, reply } if index < holds.len() => self
                .acquired(&holds[index], reply)
                .map(|answer| Answer::Refused(index, Box::new(answer))),
            reply => Err(format!("{reply:?} for {} keys", holds.len())),
        })
    }

    async fn renew(&self, renewals: &[(Hold, Duration)]) -> Result<Reply, StoreError> {
        let renewals: Vec<_> = renewals
            .iter()
            .map(|(hold, lease)| Renewal::new(hold.clone(), *lease))
            .collect();
        let replies = self.store.renew(&renewals).await;
        if replies.len() != renewals.len() {
            return Ok(Err(format!("{replies:?} for {} renewals", renewals.len())));
        }
        let ttl = |reply: RenewReply| match reply {
            RenewReply::Renewed { ttl } => Some(self.units(ttl)),
            _ => None,
        };
        let replies = replies.into_iter().map(|reply| reply.map(ttl));
        Ok(Ok(Answer::Renewals(replies.collect::<Result<_, _>>()?)))
    }

    fn units(&self, ttl: Duration) -> Units {
        Units::of(ttl, self.unit)
    }

    fn acquired(&mut self, hold: &Hold, reply: AcquireReply) -> Reply {
        Ok(match reply {
            AcquireReply::Granted(grant) => Answer::Granted(self.granted(hold, grant)?),
            AcquireReply::Busy { holder_ttl, .. } => {
                Answer::Busy(holder_ttl.map(|ttl| self.units(ttl)))
            }
            AcquireReply::Queued {
                counter,
                holder_ttl,
            } => self.queued(hold, counter, holder_ttl)?,
            AcquireReply::Late => Answer::Late,
            AcquireReply::ForeignKey(_) => Answer::ForeignKey,
            AcquireReply::ModeMismatch => Answer::ModeMismatch,
            AcquireReply::Done(done) => Answer::IsDone(done.value.clone()),
            reply => return unknown(&reply),
        })
    }

    fn released(&mut self, hold: &Hold, next: Option<NextHolder>, reply: ReleaseReply) -> Reply {
        match (reply, next) {
            (ReleaseReply::Released, _) => Ok(Answer::Released),
            (ReleaseReply::NotHeld, _) => Ok(Answer::NotHeld),
            (ReleaseReply::Passed(grant), Some(next)) => {
                let hold = Hold::new(hold.key.clone(), hold.mode, next.token);
                self.granted(&hold, grant).map(Answer::Passed)
            }
            (
                ReleaseReply::Queued {
                    counter,
                    holder_ttl,
                },
                Some(_),
            ) => self.queued(hold, counter, holder_ttl),
            (reply, _) => unknown(&reply),
        }
    }

    /// Checks that the counter is at least the latest fencing token returned before.
    fn queued(
        &self,
        hold: &Hold,
        counter: Option<FencingToken>,
        holder_ttl: Option<Duration>,
    ) -> Reply {
        let latest = self.latest_of(&hold.key, hold.mode.kind());
        if counter < latest {
            return Err(format!("counter {counter:?} after {latest:?}"));
        }
        Ok(Answer::Queued(holder_ttl.map(|ttl| self.units(ttl))))
    }

    fn latest_of(&self, key: &LockKey, kind: LockKind) -> Option<FencingToken> {
        let latest = self.latest.get(&(key.clone(), kind));
        latest.map(|(fence, _)| *fence)
    }

    /// Checks that the fencing token of a grant is the largest of its key, or repeats that of the
    /// same holder.
    fn granted(&mut self, hold: &Hold, grant: Grant) -> Result<Granted, String> {
        let Grant {
            fence,
            ttl,
            reserved,
            ..
        } = grant;
        let last = fence.number().checked_add(reserved.into());
        let last = last.and_then(FencingToken::new).ok_or("no fencing token")?;
        let lock = (hold.key.clone(), hold.mode.kind());
        let latest = self.latest.get(&lock).copied();
        let fresh = latest.is_none_or(|(latest, _)| latest < fence);
        // The reply to a repeated request of a writer has the last of its reserved tokens.
        let repeated = if hold.mode == Mode::Exclusive {
            latest == Some((fence, hold.token))
        } else {
            self.of_holds.get(hold) == Some(&fence)
        };
        if !fresh && !repeated {
            return Err(format!(
                "fencing tokens of a key are not unique and increasing: {fence} after {latest:?}"
            ));
        }
        if fresh {
            self.latest.insert(lock, (last, hold.token));
            self.of_holds.insert(hold.clone(), fence);
        }
        Ok(Granted {
            fresh,
            ttl: self.units(ttl),
            reserved,
        })
    }

    fn inspected(&self, key: &LockKey, kind: LockKind, found: Inspection) -> Reply {
        let latest = self.latest_of(key, kind);
        // After a hand-off the store has a larger token, which it has not returned yet.
        if self.remembers && found.fence < latest {
            return Err(format!(
                "{:?} is older than the latest fencing token, which is {latest:?}",
                found.fence
            ));
        }
        let holders = found
            .holders
            .iter()
            .map(|it| (it.mode, it.ttl.map(|ttl| self.units(ttl)), it.is_done))
            .collect();
        let waiters = found
            .waiters
            .iter()
            .map(|waiter| (waiter.mode, self.units(waiter.lease)))
            .collect();
        Ok(Answer::Inspected { holders, waiters })
    }
}

fn deadline(late: bool) -> Instant {
    if late {
        Instant::now() - LATE
    } else {
        Instant::now() + AHEAD
    }
}
