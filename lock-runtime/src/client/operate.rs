//! What operators ask of a lock: [`Inspect`] and [`Revoke`].

use std::{future::IntoFuture, time::Duration};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, join},
};

use super::LockClient;
use crate::{
    error::LockError,
    request::key::{IntoLockKey, LockKey},
    request::spec::LockKind,
    shell::call::within,
    shell::runtime,
    store::{HolderId, Inspection, KeyPart, RevokeReply, RevokeScope},
};

/// The time limit of an inspection. In Redis a long wait queue is a hundred pages, and each of them
/// has the time of a call.
const INSPECTION: Duration = Duration::from_secs(2);

impl LockClient {
    /// Inspects a lock, without the names of clients and without other sessions.
    pub(super) async fn inspected(
        &self,
        key: &LockKey,
        kind: LockKind,
    ) -> Result<Inspection, LockError> {
        let named = |error: LockError| error.with_key(key);
        runtime::check().map_err(named)?;
        let seen = within(INSPECTION, self.core.store.inspect(key, kind)).await;
        seen.map_err(|error| named(LockError::from_store(error)))
    }
}

/// A look at a lock, returned by [`LockClient::inspect`]. Await it, or call `into_future` where a
/// future is asked for.
#[derive(Clone, Debug)]
#[must_use = "inspections do nothing unless awaited"]
pub struct Inspect {
    client: LockClient,
    key: Result<LockKey, LockError>,
    kind: LockKind,
}

impl Inspect {
    pub(super) fn new(client: LockClient, key: impl IntoLockKey) -> Self {
        Self {
            client,
            key: key.into_lock_key(),
            kind: LockKind::Lock,
        }
    }

    /// Looks at the permits of this name in place of the lock.
    pub fn permits(mut self) -> Self {
        self.kind = LockKind::Permits;
        self
    }

    async fn inspect(self) -> Result<Inspection, LockError> {
        let Self { client, key, kind } = self;
        let key = key?;
        let asking = client
            .core
            .bounded(&key, client.core.store.blockers(&key, kind));
        let (seen, blocked_by) = join(client.inspected(&key, kind), asking).await;
        let mut seen = [seen?];
        seen[0].blocked_by = blocked_by.unwrap_or_default();
        client.core.names.add_names(&mut seen).await;
        let [seen] = seen;
        Ok(seen)
    }
}

impl IntoFuture for Inspect {
    type Output = Result<Inspection, LockError>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        self.inspect().boxed()
    }
}

/// A revocation, returned by [`LockClient::revoke`]. Await it, or call `into_future` where a future
/// is asked for.
#[derive(Clone, Debug)]
#[must_use = "revocations do nothing unless awaited"]
pub struct Revoke {
    client: LockClient,
    key: Result<LockKey, LockError>,
    kind: LockKind,
    holder: Option<HolderId>,
    is_endless: bool,
}

impl Revoke {
    pub(super) fn new(client: LockClient, key: impl IntoLockKey) -> Self {
        Self {
            client,
            key: key.into_lock_key(),
            kind: LockKind::Lock,
            holder: None,
            is_endless: false,
        }
    }

    /// Revokes the permits of this name in place of the lock.
    pub fn permits(mut self) -> Self {
        self.kind = LockKind::Permits;
        self
    }

    /// Takes the lock from this holder only, whose [`Holder::id`](crate::operator::Holder::id) an
    /// inspection or a list has shown, and only if it still holds the lock: the store compares in
    /// the same step. Otherwise the reply is [`Changed`](Revocation::Changed) or
    /// [`NotHeld`](Revocation::NotHeld).
    pub fn holder(mut self, holder: HolderId) -> Self {
        self.holder = Some(holder);
        self
    }

    /// Removes a lock without an expiry as well, which this library never creates. It is left
    /// untouched otherwise, unless it is that of the [`holder`](Self::holder).
    pub fn also_endless(mut self) -> Self {
        self.is_endless = true;
        self
    }

    async fn revoke(self) -> Result<Revocation, LockError> {
        let Self {
            client,
            key,
            kind,
            holder,
            is_endless,
        } = self;
        let scope = match holder {
            Some(id) => RevokeScope::Holder(id),
            None if is_endless => RevokeScope::AlsoEndless,
            None => RevokeScope::Leased,
        };
        let (core, key) = (&client.core, key?);
        let mut holders = core.with_state(|state| state.session.holders_of(kind, &key));
        if let RevokeScope::Holder(id) = scope {
            holders.retain(|token| HolderId::of(&key, *token, false) == id);
        }
        let revoking = core.store.revoke(&key, kind, scope);
        let reply = core.bounded(&key, revoking).await?;
        Ok(match reply {
            RevokeReply::Revoked => {
                core.visit(|state, cx| state.session.revoked(kind, &key, &holders, cx));
                Revocation::Revoked
            }
            RevokeReply::NotHeld => Revocation::NotHeld,
            RevokeReply::Changed => Revocation::Changed,
            RevokeReply::Endless => Revocation::Endless,
            RevokeReply::ForeignKey => return Err(core.foreign(&key, kind, KeyPart::Lock)),
        })
    }
}

impl IntoFuture for Revoke {
    type Output = Result<Revocation, LockError>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        self.revoke().boxed()
    }
}

/// The outcome of [`LockClient::revoke`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Revocation {
    /// The lock was taken away.
    Revoked,
    /// The lock was not held.
    NotHeld,
    /// The lock is held, but not by the given holder any more. It was left untouched.
    Changed,
    /// The key has no expiry, so it may not be a lock. It was left untouched.
    Endless,
}
