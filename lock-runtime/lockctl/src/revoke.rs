//! `lockctl revoke` and `lockctl forget`.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};

use lock_runtime::{
    LockClient, LockError, LockErrorKind, LockKind,
    operator::{self, HolderId},
    text::visible,
};

use crate::{
    Failure,
    args::{Revocation, Store},
    inspect, status,
};

/// The number of locks that are shown before the question.
const SHOWN: usize = 20;

pub(crate) async fn revoke(store: &Store, revocation: Revocation) -> Result<u8, Failure> {
    if let Some(prefix) = &revocation.prefix {
        return with_prefix(store, prefix).await;
    }
    let Revocation {
        ref key,
        holder,
        all,
        permits,
        ..
    } = revocation;
    if holder.is_none() && !all && !io::stdin().is_terminal() {
        let message =
            "without a terminal to ask at, give --holder ID (as `inspect` shows it) or --all";
        return Err(Failure::usage(message));
    }
    let locks = store.connect().await?;
    let mut is_revoked = false;
    let mut said = |holder: Option<HolderId>, reply| {
        is_revoked |= reply == operator::Revocation::Revoked;
        say(store.json, key, holder, reply)
    };
    match holder {
        Some(id) => said(
            holder,
            of_holder(&locks, key, permits, id).await.map_err(unknown)?,
        )?,
        None if all => said(None, of_all(&locks, &revocation).await.map_err(unknown)?)?,
        None => {
            let state = inspect::read(&locks, key, permits).await?;
            inspect::write(key, permits, &state, &mut io::stderr())?;
            if !state.holders.is_empty() && confirmed()? {
                for holder in &state.holders {
                    // Each at once: an error at the next one must not hide it.
                    let reply = of_holder(&locks, key, permits, holder.id).await;
                    let reply = reply.map_err(unknown)?;
                    said(Some(holder.id), reply)?;
                }
            }
        }
    }
    locks.shutdown().await;
    Ok(if is_revoked { 0 } else { status::NO })
}

/// Removes a result.
pub(crate) async fn forget(store: &Store, key: &str) -> Result<u8, Failure> {
    let locks = store.connect().await?;
    let is_forgotten = locks.once(key).forget().await.map_err(unknown)?;
    let outcome = if is_forgotten {
        "forgotten"
    } else {
        "not_done"
    };
    if store.json {
        let line = serde_json::json!({ "key": key, "outcome": outcome });
        writeln!(io::stdout(), "{line}")?;
    } else {
        let shown = visible(key);
        writeln!(io::stdout(), "{shown}: {}", outcome.replace('_', " "))?;
    }
    locks.shutdown().await;
    Ok(if is_forgotten { 0 } else { status::NO })
}

/// Revokes all holders of the locks whose names begin with `prefix`, as far as they are shown.
async fn with_prefix(store: &Store, prefix: &str) -> Result<u8, Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::usage("--prefix needs a terminal to ask at"));
    }
    let locks = store.connect().await?;
    let mut list = locks.list(prefix);
    let mut found = Vec::new();
    while let Some(lock) = list.next().await {
        found.push(lock?);
    }
    found.retain(|lock| !lock.state.holders.is_empty());
    for lock in found.iter().take(SHOWN) {
        let permits = lock.kind == LockKind::Permits;
        inspect::write(lock.key.as_str(), permits, &lock.state, &mut io::stderr())?;
    }
    let number = found.len();
    if number > SHOWN {
        writeln!(io::stderr(), "and {} more", number - SHOWN)?;
    }
    let mut is_revoked = false;
    let shown = visible(prefix);
    writeln!(
        io::stderr(),
        "{number} locks whose names begin with {shown:?}"
    )?;
    if number > 0 && confirmed()? {
        for lock in &found {
            let permits = lock.kind == LockKind::Permits;
            let key = lock.key.as_str();
            for holder in &lock.state.holders {
                let reply = of_holder(&locks, key, permits, holder.id).await;
                let reply = reply.map_err(unknown)?;
                is_revoked |= reply == operator::Revocation::Revoked;
                say(store.json, key, Some(holder.id), reply)?;
            }
        }
    }
    locks.shutdown().await;
    Ok(if is_revoked { 0 } else { status::NO })
}

/// The error of a revocation. A call without a reply may have been executed.
fn unknown(error: LockError) -> Failure {
    let is_unknown = error.kind() == LockErrorKind::Unavailable;
    let mut failure = Failure::from(error);
    if is_unknown {
        failure.message = format!(
            "it is not known whether it was revoked: {}",
            failure.message
        );
    }
    failure
}

fn say(
    as_json: bool,
    key: &str,
    holder: Option<HolderId>,
    reply: operator::Revocation,
) -> io::Result<()> {
    let (code, sentence) = describe(reply);
    let id = holder.map(|holder| holder.to_string());
    if as_json {
        let line = serde_json::json!({ "key": key, "holder": id, "outcome": code });
        return writeln!(io::stdout(), "{line}");
    }
    let from = id.map_or_else(String::new, |id| format!(" from {id}"));
    writeln!(io::stdout(), "{}{from}: {sentence}", visible(key))
}

async fn of_holder(
    locks: &LockClient,
    key: &str,
    permits: bool,
    holder: HolderId,
) -> Result<operator::Revocation, LockError> {
    match permits {
        true => locks.revoke(key).permits().holder(holder).await,
        false => locks.revoke(key).holder(holder).await,
    }
}

async fn of_all(
    locks: &LockClient,
    revocation: &Revocation,
) -> Result<operator::Revocation, LockError> {
    let key = revocation.key.as_str();
    match (revocation.permits, revocation.endless) {
        (true, _) => locks.revoke(key).permits().await,
        (false, true) => locks.revoke(key).also_endless().await,
        (false, false) => locks.revoke(key).await,
    }
}

/// Asks at the terminal.
fn confirmed() -> io::Result<bool> {
    write!(
        io::stderr(),
        "Revoke? The holders may still be at work. [y/N] "
    )?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn describe(reply: operator::Revocation) -> (&'static str, &'static str) {
    match reply {
        operator::Revocation::Revoked => ("revoked", "revoked"),
        operator::Revocation::NotHeld => ("not_held", "not held"),
        operator::Revocation::Changed => {
            ("changed", "not revoked: that holder no longer has the lock")
        }
        operator::Revocation::Endless => (
            "endless",
            "not revoked: the key has no expiry, so it may not be a lock; --all --endless revokes it",
        ),
        _ => ("unknown", "not revoked"),
    }
}
