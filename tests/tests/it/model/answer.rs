//! A store that executes one step at a time, with its replies in a form that two stores have in
//! common.

use crate::replies::{Replies as _, poll};
use std::{collections::HashMap, sync::Arc, time::Duration};

use lock_runtime::{
    FencingToken, LockKey, LockKind, Mode, RevokeReply,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Grant, HandOff, Heir, Hold, Inspection,
        KeyRequest, PollReply, QuorumMember, Release, ReleaseReply, RenewReply, Renewal,
        StoreError, Token,
    },
};
use tokio::time::Instant;

use super::step::Step;

/// Remaining time of a lease, to the nearest hour: leases are whole hours or end at once, and a run
/// takes minutes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hours(u64);

impl From<Duration> for Hours {
    fn from(ttl: Duration) -> Self {
        Self((ttl.as_secs() + 1800) / 3600)
    }
}

/// A grant. The fencing tokens of two stores differ, but both stores agree whether a token is
/// larger than all earlier ones of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Granted {
    fresh: bool,
    ttl: Hours,
    reserved: u32,
}

/// A reply, without the parts that are specific to one store.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Answer {
    #[default]
    Done,
    Granted(Granted),
    AllGranted(Vec<Granted>),
    Refused(usize, Box<Answer>),
    Busy(Option<Hours>),
    Queued(Option<Hours>),
    Late,
    ForeignKey,
    ModeMismatch,
    Gone,
    Renewals(Vec<Option<Hours>>),
    Released,
    Passed(Granted),
    NotHeld,
    Converted(Granted),
    Inspected {
        holders: Vec<(Mode, Option<Hours>)>,
        waiters: Vec<(Mode, Hours)>,
    },
    Revocation(RevokeReply),
    Failed(String),
}

/// One of the two stores, and the fencing tokens that it has returned.
pub(super) struct Side {
    store: Arc<dyn QuorumMember>,
    /// The channel of an heir, on a server.
    channel: Option<Arc<str>>,
    fences: HashMap<(LockKey, LockKind), (FencingToken, Token)>,
    remembers: bool,
}

impl Side {
    pub(super) fn new(store: Arc<dyn QuorumMember>) -> Self {
        Self {
            store,
            channel: None,
            fences: HashMap::new(),
            remembers: false,
        }
    }

    /// Marks a store that keeps the latest fencing token of a key also while the key has no holder.
    pub(super) fn remembering(self) -> Self {
        Self {
            remembers: true,
            ..self
        }
    }

    pub(super) fn with_channel(self, channel: Option<Arc<str>>) -> Self {
        Self { channel, ..self }
    }

    /// Executes a step. An error describes a reply that no store may ever give.
    pub(super) async fn take(&mut self, step: &Step) -> Result<Answer, String> {
        self.ask(step)
            .await
            .unwrap_or_else(|error| Ok(Answer::Failed(error.to_string())))
    }

    async fn ask(&mut self, step: &Step) -> Result<Result<Answer, String>, StoreError> {
        let store = self.store.clone();
        let deadline = Instant::now() + Duration::from_secs(3600);
        Ok(match step {
            Step::Acquire {
                hold,
                lease,
                late,
                queue,
                reserved,
            } => {
                let deadline = if *late {
                    Instant::now() - Duration::from_secs(5)
                } else {
                    deadline
                };
                let request = KeyRequest::new(hold.clone(), *lease, deadline).reserved(*reserved);
                let request = if *queue { request.queued() } else { request };
                let reply = store.acquire(&request).await?;
                self.acquired(hold, reply)
            }
            Step::AcquireAll { holds, lease } => {
                let request = |hold: &Hold| KeyRequest::new(hold.clone(), *lease, deadline);
                let requests: Vec<_> = holds.iter().map(request).collect();
                match store.acquire_all(&requests).await? {
                    AcquireAllReply::Granted(grants) if grants.len() == holds.len() => {
                        let granted = holds
                            .iter()
                            .zip(grants)
                            .map(|(hold, grant)| self.granted(hold, grant));
                        granted.collect::<Result<_, _>>().map(Answer::AllGranted)
                    }
                    AcquireAllReply::Refused { index, reply } => self
                        .acquired(&holds[index], reply)
                        .map(|answer| Answer::Refused(index, Box::new(answer))),
                    reply => Err(format!("{reply:?}")),
                }
            }
            Step::Poll(hold) => match poll(&*store, hold).await? {
                PollReply::Granted(grant) => self.granted(hold, grant).map(Answer::Granted),
                PollReply::Gone => Ok(Answer::Gone),
                PollReply::Queued {
                    counter,
                    holder_ttl,
                } => self.queued(hold, counter, holder_ttl),
                reply => Err(format!("{reply:?}")),
            },
            Step::Renew(renewals) => {
                let renewals: Vec<_> = renewals
                    .iter()
                    .map(|(hold, lease)| Renewal::new(hold.clone(), *lease))
                    .collect();
                let hours = |reply: RenewReply| match reply {
                    RenewReply::Renewed { ttl } => Some(ttl.into()),
                    _ => None,
                };
                Ok(Answer::Renewals(
                    store
                        .renew(&renewals)
                        .await
                        .all()?
                        .into_iter()
                        .map(hours)
                        .collect(),
                ))
            }
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
                match (store.release(&release).await?, next) {
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
                    (reply, _) => Err(format!("{reply:?}")),
                }
            }
            Step::HandOff {
                hold,
                heir,
                is_coordinator,
                late,
            } => {
                let deadline = if *late {
                    Instant::now() - Duration::from_secs(5)
                } else {
                    deadline
                };
                // The clock of both decides.
                let proposal = FencingToken::new(1).expect("a number");
                let heir = Heir::new(*heir, self.channel.clone());
                let hand_off =
                    HandOff::new(heir, proposal, deadline).at_coordinator(*is_coordinator);
                match store
                    .hand_off(&Release::new(hold.clone()), &hand_off)
                    .await?
                {
                    ReleaseReply::Released => Ok(Answer::Released),
                    ReleaseReply::NotHeld => Ok(Answer::NotHeld),
                    reply => Err(format!("{reply:?}")),
                }
            }
            Step::Convert(hold) => match store.convert(hold).await? {
                ConvertReply::Converted(grant) => {
                    let hold = Hold::new(hold.key.clone(), Mode::Shared, hold.token);
                    self.granted(&hold, grant).map(Answer::Converted)
                }
                ConvertReply::NotHeld => Ok(Answer::NotHeld),
                reply => Err(format!("{reply:?}")),
            },
            Step::Abandon(hold) => Ok(store.abandon(hold).await.map(|()| Answer::Done)?),
            Step::Inspect(key, kind) => {
                self.inspected(key, *kind, store.inspect(key, *kind).await?)
            }
            Step::Revoke(key, kind, scope) => {
                Ok(Answer::Revocation(store.revoke(key, *kind, *scope).await?))
            }
        })
    }

    fn acquired(&mut self, hold: &Hold, reply: AcquireReply) -> Result<Answer, String> {
        Ok(match reply {
            AcquireReply::Granted(grant) => Answer::Granted(self.granted(hold, grant)?),
            AcquireReply::Busy { holder_ttl, .. } => Answer::Busy(holder_ttl.map(Hours::from)),
            AcquireReply::Queued {
                counter,
                holder_ttl,
            } => self.queued(hold, counter, holder_ttl)?,
            AcquireReply::Late => Answer::Late,
            AcquireReply::ForeignKey(_) => Answer::ForeignKey,
            AcquireReply::ModeMismatch => Answer::ModeMismatch,
            reply => return Err(format!("{reply:?}")),
        })
    }

    /// Checks that the counter is at least the latest fencing token returned before.
    fn queued(
        &self,
        hold: &Hold,
        counter: Option<FencingToken>,
        holder_ttl: Option<Duration>,
    ) -> Result<Answer, String> {
        let latest = self
            .fences
            .get(&(hold.key.clone(), hold.mode.kind()))
            .map(|(fence, _)| *fence);
        if counter < latest {
            return Err(format!("counter {counter:?} after {latest:?}"));
        }
        Ok(Answer::Queued(holder_ttl.map(Hours::from)))
    }

    /// Checks that the fencing token of a grant is the largest of its key, or repeats that of the
    /// same exclusive holder.
    fn granted(
        &mut self,
        hold: &Hold,
        Grant {
            fence,
            ttl,
            reserved,
            ..
        }: Grant,
    ) -> Result<Granted, String> {
        let last =
            FencingToken::new(fence.number() + u64::from(reserved)).ok_or("no fencing token")?;
        let latest = self
            .fences
            .insert((hold.key.clone(), hold.mode.kind()), (last, hold.token));
        let fresh = latest.is_none_or(|(latest, _)| latest < fence);
        let repeated = hold.mode == Mode::Exclusive && latest == Some((fence, hold.token));
        if fresh || repeated {
            Ok(Granted {
                fresh,
                ttl: ttl.into(),
                reserved,
            })
        } else {
            Err(format!("fencing token {fence} after {latest:?}"))
        }
    }

    fn inspected(
        &self,
        key: &LockKey,
        kind: LockKind,
        found: Inspection,
    ) -> Result<Answer, String> {
        let latest = self
            .fences
            .get(&(key.clone(), kind))
            .map(|(fence, _)| *fence);
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
            .map(|holder| (holder.mode, holder.ttl.map(Hours::from)))
            .collect();
        let waiters = found
            .waiters
            .iter()
            .map(|waiter| (waiter.mode, waiter.lease.into()))
            .collect();
        Ok(Answer::Inspected { holders, waiters })
    }
}
