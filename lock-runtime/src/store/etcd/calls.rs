//! The calls to an etcd cluster: each is one transaction, with a tick of the shared clock.

use std::{
    collections::HashSet,
    slice,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::sync::OnceCell;

use super::{
    super::{
        KeyPart, StoreError, StoreErrorKind,
        records::{
            ReadReply, Record, RecordName, Run, SharedClock, Swap, SwapReply, Swapped, Tick,
            Ticked, Timestamp, Version,
            groups::{Group, Grouping},
        },
    },
    error,
    layout::Layout,
    members::Members,
    messages::{
        Compare, KeyValue, LEASE_GRANT, LeaseGrantRequest, LeaseGrantResponse, RANGE, RangeRequest,
        RangeResponse, RequestOp, ResponseOp, TXN, TxnRequest, TxnResponse,
    },
    settings::Target,
};
use crate::shell::{sync::lock, time::Instant};

const FORMAT: &[u8] = b"1";
/// Between the version of a record and its content. So versions can be compared in order.
const SEPARATOR: u8 = 1;
/// The etcd lease of most records and of messages: of a lock lease of a day, of the day for which a
/// record is kept after it, and of the time for which an etcd lease is shared.
const KEPT_FOR: Duration = Duration::from_secs(50 * 3600);
/// The time for which what is written gets the same etcd lease.
const SHARED_FOR: Duration = Duration::from_secs(600);
/// The age up to which an etcd lease is used if there is no new one. [`KEPT_FOR`] has room for it.
const LASTS_ON: Duration = Duration::from_secs(3600);
/// The operations in one list of a transaction; a server refuses more than 128 by default, those
/// of a nested transaction included.
const OPERATIONS: usize = 120;
/// The swaps in one transaction.
const SWAPS: usize = 60;
/// The content of the records and messages in a transaction of several swaps. A server refuses
/// requests of more than 1.5 MiB by default.
const BYTES: usize = 500_000;
/// The transactions in flight from which on swaps share the next one.
const CALLS: usize = 4;
/// The records in one page of a list.
const PAGE: i64 = 500;

/// The calls to a cluster.
pub(super) struct Calls {
    pub(super) members: Arc<Members>,
    pub(super) layout: Layout,
    pub(super) clock: Arc<SharedClock>,
    /// Set when the format of the keys is known to be this one.
    pub(super) format: Arc<OnceCell<()>>,
    /// The etcd lease of what is written now, and the time of its grant.
    lease: Mutex<Option<(i64, Instant)>>,
    group: Group,
}

impl Calls {
    pub(super) fn new(
        target: &Target,
        layout: Layout,
        clock: Arc<SharedClock>,
        format: Arc<OnceCell<()>>,
    ) -> Self {
        Self {
            members: Arc::new(Members::new(target)),
            layout,
            clock,
            format,
            lease: Mutex::default(),
            group: Group::new(CALLS),
        }
    }

    /// Makes a call again while its member is unavailable, once for each member.
    pub(super) async fn of_any_member<T, F>(&self, call: impl Fn() -> F) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let mut reply = call().await;
        for _ in 0..self.members.count() {
            match &reply {
                Err(error) if error.kind() == StoreErrorKind::Unavailable => {}
                _ => break,
            }
            reply = call().await;
        }
        reply
    }

    /// Checks the format of the keys before the first call.
    pub(super) async fn ready(&self) -> Result<(), StoreError> {
        let check = || async {
            let checked = self.check_format().await;
            checked.map_err(|error| error.with_unsent(true))
        };
        self.format.get_or_try_init(check).await.copied()
    }

    /// Reads the format of the keys, and writes it if there is none.
    async fn check_format(&self) -> Result<(), StoreError> {
        let key = self.layout.format();
        let txn = TxnRequest {
            compare: vec![Compare::absent(&key)],
            success: vec![RequestOp::put(&key, FORMAT.to_vec(), 0)],
            failure: vec![RequestOp::get(&key)],
        };
        let reply: TxnResponse = self.members.call(TXN, txn).await?;
        let found = reply.responses.into_iter().find_map(ResponseOp::into_kv);
        match found {
            Some(kv) if !reply.succeeded && kv.value != FORMAT => {
                let message = format!(
                    "the keys of the namespace {:?} have another format: choose another namespace, or use \
                     versions of this library with one format",
                    self.layout.0
                );
                Err(StoreError::new(StoreErrorKind::IncompatibleFormat, message))
            }
            _ => Ok(()),
        }
    }

    /// Returns the etcd lease of what is written now.
    async fn lease(&self) -> Result<i64, StoreError> {
        let now = Instant::now();
        if let Some((id, since)) = *lock(&self.lease)
            && now < since + SHARED_FOR
        {
            return Ok(id);
        }
        let ttl = KEPT_FOR.as_secs() as i64;
        let granted = self.members.call(LEASE_GRANT, LeaseGrantRequest { ttl });
        let LeaseGrantResponse { id } = match (granted.await, *lock(&self.lease)) {
            (Ok(granted), _) => granted,
            // Such as that of a full member, which still accepts renewals.
            (Err(_), Some((id, since))) if now < since + LASTS_ON => return Ok(id),
            // The call that needs it was not sent.
            (Err(error), _) => return Err(error.with_unsent(true)),
        };
        *lock(&self.lease) = Some((id, now));
        Ok(id)
    }

    /// Returns the etcd lease of a swap. A record that is needed for longer than most, such as one
    /// with a result, gets a lease of its own.
    async fn lease_of(&self, swap: &Swap) -> Result<i64, StoreError> {
        let ends = swap.changes.iter().map(|change| change.needed_until);
        let needed_for = ends.max().map(|end| end.since(swap.not_before));
        let Some(longer) = needed_for.filter(|it| *it > KEPT_FOR - LASTS_ON) else {
            return self.lease().await;
        };
        let ttl = (longer + LASTS_ON).as_secs() as i64;
        let granted = self.members.call(LEASE_GRANT, LeaseGrantRequest { ttl });
        let LeaseGrantResponse { id } = granted
            .await
            .map_err(|error: StoreError| error.with_unsent(true))?;
        Ok(id)
    }

    /// Executes operations together with the tick of the clock.
    async fn run(
        &self,
        not_before: Timestamp,
        parts: &[RequestOp],
    ) -> Result<Run<Vec<ResponseOp>>, StoreError> {
        let key = self.layout.clock();
        let put = |to: u64| RequestOp::put(&key, to.to_be_bytes().to_vec(), 0);
        let call = async |tick: Tick| {
            let mut txn = TxnRequest::default();
            match tick {
                Tick::Start(to) => {
                    txn.compare.push(Compare::absent(&key));
                    txn.success.push(put(to));
                }
                Tick::Replace { known, to } => {
                    let known = known.to_be_bytes().to_vec();
                    txn.compare.push(Compare::equal(&key, known));
                    txn.success.push(put(to));
                }
                Tick::Raise(to) => {
                    let raise = TxnRequest {
                        compare: vec![Compare::below(&key, to.to_be_bytes().to_vec())],
                        success: vec![put(to)],
                        failure: Vec::new(),
                    };
                    txn.success.push(raise.into());
                }
                Tick::Keep => {}
            }
            let ticks = txn.success.len();
            txn.success.extend_from_slice(parts);
            txn.success.push(RequestOp::get(&key));
            txn.failure.push(RequestOp::get(&key));
            let mut reply: TxnResponse = self.members.call(TXN, txn).await?;
            let clock = reply.responses.pop().ok_or_else(error::no_reply)?;
            let value = clock.into_kv().map(|kv| self.value(&kv)).transpose()?;
            let mut is_taken = reply.succeeded && ticks > 0;
            if let Tick::Raise(_) = tick {
                let raised = reply.responses.drain(..1.min(reply.responses.len())).next();
                is_taken = raised
                    .and_then(ResponseOp::into_txn)
                    .ok_or_else(error::no_reply)?
                    .succeeded;
            } else if reply.succeeded {
                reply.responses.drain(..ticks.min(reply.responses.len()));
            }
            Ok(Ticked::new(value, is_taken, reply.responses))
        };
        self.clock.run(not_before, call).await
    }

    fn value(&self, kv: &KeyValue) -> Result<u64, StoreError> {
        let foreign = || {
            let key = String::from_utf8_lossy(&kv.key).into_owned();
            let message = format!(
                "the key {key}, in which etcd keeps the clock of the locks, contains foreign data and was left \
                 untouched: choose another namespace, or move the data"
            );
            StoreError::new(StoreErrorKind::ForeignKey, message)
        };
        Layout::micros(&kv.value).ok_or_else(foreign)
    }

    /// Returns the record under a key.
    fn record(&self, kv: &KeyValue, name: &RecordName) -> Result<Record, StoreError> {
        let parts = || {
            let (version, rest) = kv.value.split_first_chunk::<8>()?;
            let (separator, body) = rest.split_first()?;
            let version = Version::from_number(u64::from_be_bytes(*version))?;
            (*separator == SEPARATOR).then(|| Record::new(version, body.to_vec()))
        };
        parts().ok_or_else(|| {
            let key = format!("{}/r/{name}", self.layout.0);
            StoreError::foreign(Some(&key), KeyPart::Lock)
        })
    }

    /// Returns the part of a transaction that makes a swap. `room` is that of its operations, and
    /// `number` that of the next message.
    fn part(&self, swap: &Swap, lease: i64, room: usize, number: &mut usize) -> RequestOp {
        let mut txn = TxnRequest::default();
        for change in &swap.changes {
            let key = self.layout.record(change.name.as_str());
            match change.known {
                None => txn.compare.push(Compare::absent(&key)),
                Some(version) => {
                    let first = version.number().to_be_bytes().to_vec();
                    let end = [&first[..], &[SEPARATOR + 1]].concat();
                    txn.compare.push(Compare::above(&key, first));
                    txn.compare.push(Compare::below(&key, end));
                }
            }
            let version = change.record.version.number().to_be_bytes();
            let value = [&version[..], &[SEPARATOR], &change.record.body].concat();
            txn.success.push(RequestOp::put(&key, value, lease));
            txn.failure.push(RequestOp::get(&key));
        }
        let room = room.saturating_sub(txn.success.len());
        // A swap that wakes more waiters than there is room for leaves some to their polls.
        for message in swap.messages.iter().take(room) {
            let key = self.layout.message(message.to, *number);
            *number += 1;
            let put = RequestOp::put(&key, message.body.clone(), lease);
            txn.success.push(put);
        }
        txn.into()
    }

    /// Makes swaps of different records in one transaction.
    async fn swap_together(
        &self,
        swaps: &[Swap],
    ) -> Result<Vec<Result<SwapReply, StoreError>>, StoreError> {
        let not_before = swaps.iter().map(|swap| swap.not_before).max();
        let mut has_repeated = false;
        let run = loop {
            let mut parts = Vec::with_capacity(swaps.len());
            let mut number = 0;
            let room = OPERATIONS - swaps.len();
            for swap in swaps {
                let lease = self.lease_of(swap).await?;
                parts.push(self.part(swap, lease, room, &mut number));
            }
            match self.run(not_before.unwrap_or_default(), &parts).await {
                // An operator has revoked it. Nothing was done.
                Err(error) if error::is_lease_gone(&error) && !has_repeated => {
                    *lock(&self.lease) = None;
                    has_repeated = true;
                }
                run => break run?,
            }
        };
        match run {
            Run::Early { now, latest } => {
                let early = SwapReply::new(now, Swapped::Early).latest(latest);
                Ok(vec![Ok(early); swaps.len()])
            }
            Run::Done { now, latest, reply } => {
                if reply.len() != swaps.len() {
                    return Err(error::no_reply());
                }
                let outcomes = reply.into_iter().zip(swaps);
                let outcomes = outcomes.map(|(part, swap)| self.outcome(part, swap));
                let reply = |outcome| Ok(SwapReply::new(now, outcome?).latest(latest));
                Ok(outcomes.map(reply).collect())
            }
        }
    }

    fn outcome(&self, part: ResponseOp, swap: &Swap) -> Result<Swapped, StoreError> {
        let part = part.into_txn().ok_or_else(error::no_reply)?;
        if part.succeeded {
            return Ok(Swapped::Done);
        }
        if part.responses.len() != swap.changes.len() {
            return Err(error::no_reply());
        }
        let present = part.responses.into_iter().zip(&swap.changes);
        let present = present.map(|(found, change)| {
            let kv = found.into_kv();
            kv.map(|kv| self.record(&kv, &change.name)).transpose()
        });
        Ok(Swapped::Conflict(present.collect::<Result<_, _>>()?))
    }

    pub(super) async fn swap_each(&self, swaps: &[Swap]) -> Vec<Result<SwapReply, StoreError>> {
        if let Err(error) = self.ready().await {
            return vec![Err(error); swaps.len()];
        }
        let mut replies = Vec::with_capacity(swaps.len());
        let mut rest = swaps;
        while !rest.is_empty() {
            // Several changes need room for their comparisons. etcd makes all comparisons first, so
            // each record can be changed once.
            let (mut names, mut bytes) = (HashSet::new(), 0);
            let single = rest.iter().take_while(|swap| match &swap.changes[..] {
                [change] => {
                    let messages = swap.messages.iter().map(|message| message.body.len());
                    bytes += change.record.body.len() + messages.sum::<usize>();
                    bytes <= BYTES && names.insert(&change.name)
                }
                _ => false,
            });
            let (together, others) = rest.split_at(single.count().clamp(1, SWAPS).min(rest.len()));
            match self.swap_together(together).await {
                Ok(done) => replies.extend(done),
                Err(error) => replies.extend(vec![Err(error); together.len()]),
            }
            rest = others;
        }
        replies
    }

    pub(super) async fn read(&self, names: &[RecordName]) -> Result<ReadReply, StoreError> {
        self.ready().await?;
        let mut records = Vec::with_capacity(names.len());
        let mut times: Option<(Timestamp, Timestamp)> = None;
        let mut rest = names;
        loop {
            let (chunk, others) = rest.split_at(rest.len().min(OPERATIONS));
            let get = |name: &RecordName| RequestOp::get(&self.layout.record(name.as_str()));
            let parts: Vec<_> = chunk.iter().map(get).collect();
            let run = self.run(Timestamp::default(), &parts).await?;
            let Run::Done { now, latest, reply } = run else {
                return Err(error::no_reply());
            };
            if reply.len() != chunk.len() {
                return Err(error::no_reply());
            }
            for (found, name) in reply.into_iter().zip(chunk) {
                let kv = found.into_kv();
                records.push(kv.map(|kv| self.record(&kv, name)).transpose()?);
            }
            // The records of the first part may have changed since then.
            let (first, _) = *times.get_or_insert((now, latest));
            times = Some((first, latest));
            rest = others;
            if rest.is_empty() {
                break;
            }
        }
        let (now, latest) = times.unwrap_or_default();
        Ok(ReadReply::new(now, records).latest(latest))
    }

    pub(super) async fn list(
        &self,
        prefix: &str,
        after: Option<&RecordName>,
    ) -> Result<Vec<(RecordName, Record)>, StoreError> {
        self.ready().await?;
        let all = self.layout.record("").len();
        let first = self.layout.record(prefix);
        let after = after.map(|after| [&self.layout.record(after.as_str())[..], &[0]].concat());
        let key = after.map_or_else(|| first.clone(), |after| after.max(first.clone()));
        // Names are UTF-8, so 255 comes after all of them.
        let range_end = [&first[..], &[u8::MAX]].concat();
        let range = RangeRequest {
            key,
            range_end,
            limit: PAGE,
        };
        let reply: RangeResponse = self.members.call(RANGE, range).await?;
        let named = |kv: KeyValue| {
            let name = RecordName::new(std::str::from_utf8(kv.key.get(all..)?).ok()?);
            let record = self.record(&kv, &name);
            Some(record.map(|record| (name, record)))
        };
        reply.kvs.into_iter().filter_map(named).collect()
    }
}

impl Grouping for Calls {
    fn group(&self) -> &Group {
        &self.group
    }

    async fn swap_alone(&self, swap: &Swap) -> Result<SwapReply, StoreError> {
        self.ready().await?;
        let mut replies = self.swap_together(slice::from_ref(swap)).await?;
        replies.pop().ok_or_else(error::no_reply)?
    }

    async fn swap_group(&self, swaps: &[Swap]) -> Vec<Result<SwapReply, StoreError>> {
        self.swap_each(swaps).await
    }
}
