//! The calls of operators: inspections, lists and revocations.

use std::{collections::HashSet, sync::Arc, time::Duration};

use lock_runtime::{
    LockKey, LockKind, Mode,
    operator::{ClientId, HolderId, Identity},
    store::{Hold, Release, RenewReply, RevokeReply, RevokeScope, Store, StoreErrorKind, Token},
};

use super::subject::{IMPRECISE, Subject, beside, in_time, promise, skipped, unique};

/// Checks that an inspection shows the holders and the waiters of a lock with their modes, leases
/// and clients, and nothing else.
///
/// # Panics
/// If the store breaks this promise.
pub async fn inspections_show_holders_and_waiters(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subjects = [Subject::of(make).await, Subject::of(make).await];
    in_time(async {
        for mode in subjects[0].modes() {
            holders_are_shown(&subjects, mode).await;
        }
        if subjects[0].queues().await {
            waiters_are_shown(&subjects).await;
        }
    })
    .await;
}

async fn holders_are_shown([one, other]: &[Subject; 2], mode: Mode) {
    let promise = "an inspection shows the holders of a lock";
    let key = super::subject::fresh_key();
    let found = other.inspect_key(&key, mode.kind()).await;
    let empty = found.holders.is_empty() && found.waiters.is_empty();
    promise!(
        promise,
        empty,
        "{mode:?}: the lock was never used: {found:?}"
    );
    let client = ClientId::random();
    let of_client = || Hold::new(key.clone(), mode, Token::of(client));
    let mut holds = vec![of_client()];
    if mode != Mode::Exclusive {
        holds.push(of_client());
    }
    let mut latest = None;
    // The longest lease first: holders are shown in the order in which their leases end.
    let leases = [one.lease(), one.at_least(one.lease() / 2)];
    for (hold, lease) in holds.iter().zip(leases) {
        latest = Some(one.granted(hold, lease).await.fence);
    }
    let found = other.inspect_key(&key, mode.kind()).await;
    let right = found.holders.iter().all(|holder| {
        holder.mode == mode
            && holder.client == Identity::unnamed(client)
            && !holder.is_reservation
            && holder
                .ttl
                .is_some_and(|ttl| ttl <= one.lease() + IMPRECISE && ttl > one.lease() / 4)
    });
    let ids: HashSet<_> = found.holders.iter().map(|holder| holder.id).collect();
    promise!(
        promise,
        right && ids.len() == holds.len() && found.holders.len() == holds.len(),
        "{mode:?}: {} holders of client {client} with leases of {leases:?}: {found:?}",
        holds.len()
    );
    promise!(
        "an inspection shows the holders in the order in which their leases end",
        found.holders.is_sorted_by_key(|holder| holder.ttl),
        "{mode:?}: {found:?}"
    );
    promise!(
        "an inspection shows the latest fencing token of a held lock",
        found.fence >= latest,
        "{latest:?} was granted: {found:?}"
    );
    let holders = one
        .store
        .holders(&key, mode.kind())
        .await
        .expect("the holders");
    let shown: HashSet<_> = holders.iter().map(|holder| holder.id).collect();
    promise!(
        promise,
        shown == ids,
        "{mode:?}: {holders:?} instead of {found:?}"
    );
    for hold in &holds {
        one.release(hold).await;
    }
    other
        .assert_unused(
            "an inspection shows no holder that has released its lock",
            &holds[0],
        )
        .await;
}

async fn waiters_are_shown([one, other]: &[Subject; 2]) {
    let holder = one.held(Mode::Exclusive).await;
    let modes = [Mode::Shared, Mode::Exclusive, Mode::Shared];
    let mut waiters = Vec::new();
    for mode in modes {
        waiters.push(one.waiter(&holder.key, mode).await);
    }
    let found = other.inspect(&holder).await;
    let in_order = found.waiters.iter().map(|waiter| waiter.mode).eq(modes);
    let alike = found.waiters.iter().zip(&waiters).all(|(shown, hold)| {
        shown.lease == one.lease()
            && shown.silent < Duration::from_secs(5)
            && shown.client == Identity::unnamed(hold.token.client())
    });
    promise!(
        "an inspection shows the waiters of a lock, in order",
        in_order && alike && found.holders.len() == 1,
        "waiters with modes {modes:?} and leases of {:?}: {found:?}",
        one.lease()
    );
}

/// Checks that the pages of a list together contain every lock with a holder, and none that does
/// not begin with the prefix. A store that cannot list its locks says so.
///
/// # Panics
/// If the store breaks this promise.
pub async fn lists_contain_every_held_lock(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subjects = [Subject::of(make).await, Subject::of(make).await];
    in_time(listed(&subjects)).await;
}

async fn listed([one, other]: &[Subject; 2]) {
    let (prefix, modes) = (unique(), one.modes());
    let mut held = HashSet::new();
    for number in 0..20 {
        for mode in &modes {
            let key = LockKey::new(format!("{prefix}:{number}")).expect("a short name");
            // Exclusive and shared locks of a name are the same lock.
            let free = held.insert((key.clone(), mode.kind()));
            if free {
                one.granted(&beside(&key, *mode), one.lease()).await;
            }
        }
    }
    let other_prefix = one.held(Mode::Exclusive).await;
    let Some(found) = pages(other, &prefix).await else {
        return skipped("lists", "the store cannot list its locks");
    };
    let missing: Vec<_> = held.difference(&found).collect();
    promise!(
        "a list contains every lock that is held",
        missing.is_empty(),
        "missing: {missing:?}"
    );
    let foreign: Vec<_> = found
        .iter()
        .filter(|(key, _)| !key.as_str().starts_with(&prefix))
        .collect();
    promise!(
        "a list contains only locks that begin with the prefix",
        foreign.is_empty(),
        "not {prefix}: {foreign:?}"
    );
    one.release(&other_prefix).await;
}

/// All locks with a prefix, `None` for a store that cannot list them.
async fn pages(subject: &Subject, prefix: &str) -> Option<HashSet<(LockKey, LockKind)>> {
    let (mut found, mut cursor) = (HashSet::new(), None);
    loop {
        let page = match subject.store.list(prefix, cursor).await {
            Ok(page) => page,
            Err(error) if error.kind() == StoreErrorKind::Unsupported => return None,
            Err(error) => panic!("a page of the list: {error}"),
        };
        found.extend(page.locks);
        cursor = Some(match page.next {
            Some(next) => next,
            None => return Some(found),
        });
    }
}

/// Checks that a revocation takes a lock away from all its holders, or from the one that it names.
///
/// # Panics
/// If the store breaks this promise.
pub async fn revocations_take_the_lock_away(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subjects = [Subject::of(make).await, Subject::of(make).await];
    in_time(async {
        for mode in subjects[0].modes() {
            all_are_revoked(&subjects, mode).await;
        }
        one_is_revoked(&subjects).await;
    })
    .await;
}

async fn revoke(subject: &Subject, hold: &Hold, scope: RevokeScope) -> RevokeReply {
    let revoked = subject
        .store
        .revoke(&hold.key, hold.mode.kind(), scope)
        .await;
    revoked.expect("a revocation")
}

async fn all_are_revoked([one, other]: &[Subject; 2], mode: Mode) {
    let promise = "a revocation takes the lock away from all holders";
    let holder = one.held(mode).await;
    let second = beside(&holder.key, mode);
    if mode != Mode::Exclusive {
        one.granted(&second, one.lease()).await;
    }
    for expected in [RevokeReply::Revoked, RevokeReply::NotHeld] {
        let reply = revoke(other, &holder, RevokeScope::Leased).await;
        promise!(
            promise,
            reply == expected,
            "{mode:?}: {reply:?} instead of {expected:?}"
        );
        other.assert_unused(promise, &holder).await;
    }
    for hold in [&holder, &second] {
        let reply = one.renew(hold, one.lease()).await;
        promise!(
            promise,
            reply == RenewReply::Gone,
            "{mode:?}: a renewal was answered {reply:?}"
        );
    }
    // A reservation is revoked as well.
    one.granted(&holder, one.lease()).await;
    one.release_as(Release::new(holder.clone()).keep_for(Some(one.lease())))
        .await;
    let reply = revoke(other, &holder, RevokeScope::Leased).await;
    promise!(
        promise,
        reply == RevokeReply::Revoked,
        "{mode:?}: a reservation: {reply:?}"
    );
    other.assert_unused(promise, &holder).await;
}

async fn one_is_revoked([one, other]: &[Subject; 2]) {
    let promise = "a revocation of one holder leaves the others alone";
    let first = one.held(Mode::Shared).await;
    let id = async |subject: &Subject| -> Vec<HolderId> {
        let holders = subject.inspect(&first).await.holders;
        holders.iter().map(|holder| holder.id).collect()
    };
    let of_first = id(other).await;
    let second = beside(&first.key, Mode::Shared);
    one.granted(&second, one.lease()).await;
    let scope = RevokeScope::Holder(of_first[0]);
    for expected in [RevokeReply::Revoked, RevokeReply::Changed] {
        let reply = revoke(other, &first, scope).await;
        promise!(
            promise,
            reply == expected,
            "{reply:?} instead of {expected:?}"
        );
        let left = id(one).await;
        promise!(
            promise,
            left.len() == 1 && left != of_first,
            "{of_first:?} was revoked, and {left:?} are left"
        );
    }
    let reply = one.renew(&second, one.lease()).await;
    let kept = matches!(reply, RenewReply::Renewed { .. });
    promise!(promise, kept, "the other holder: {reply:?}");
}
