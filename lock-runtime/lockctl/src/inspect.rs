//! `lockctl inspect`.

use std::io::{self, Write};

use lock_runtime::{LockClient, LockError, Mode, operator::Inspection, text::visible};

use crate::{
    Failure,
    args::Store,
    table::{Table, client, known, left, mode, time},
};

pub(crate) async fn print(store: &Store, key: &str, permits: bool) -> Result<u8, Failure> {
    let locks = store.connect().await?;
    let mut found = vec![(permits, read(&locks, key, permits).await?)];
    if !permits {
        // A name in a log does not tell its kind.
        let state = read(&locks, key, true).await?;
        if is_used(&state) {
            found.retain(|(_, lock)| is_used(lock));
            found.push((true, state));
        }
    }
    let mut output = io::stdout().lock();
    for (permits, state) in &found {
        if store.json {
            let mut value = serde_json::to_value(state).map_err(io::Error::from)?;
            value["key"] = key.into();
            value["kind"] = if *permits { "permits" } else { "lock" }.into();
            writeln!(output, "{value}")?;
        } else {
            write(key, *permits, state, &mut output)?;
        }
    }
    drop(output);
    locks.shutdown().await;
    Ok(0)
}

fn is_used(state: &Inspection) -> bool {
    !state.holders.is_empty() || !state.waiters.is_empty() || !state.blocked_by.is_empty()
}

pub(crate) async fn read(
    locks: &LockClient,
    key: &str,
    permits: bool,
) -> Result<Inspection, LockError> {
    match permits {
        true => locks.inspect(key).permits().await,
        false => locks.inspect(key).await,
    }
}

pub(crate) fn write(
    key: &str,
    permits: bool,
    state: &Inspection,
    to: &mut impl Write,
) -> io::Result<()> {
    let key = visible(key);
    let held = match state.holders.first().map(|holder| holder.mode) {
        None if !state.blocked_by.is_empty() => format!("{key} has no holder, and is blocked"),
        None if permits => format!("the permits {key} are free"),
        None => format!("{key} is free"),
        Some(Mode::Permits(all)) => {
            format!("{} of {all} permits {key} are held", state.holders.len())
        }
        Some(_) => format!("{key} is held"),
    };
    match state.fence.filter(|_| !state.holders.is_empty()) {
        // Of several holders, it is that of the latest.
        Some(fence) if state.holders.len() > 1 => {
            writeln!(to, "{held}; latest fencing token {fence}")?;
        }
        Some(fence) => writeln!(to, "{held}; fencing token {fence}")?,
        None => writeln!(to, "{held}")?,
    }
    for session in &state.blocked_by {
        let session = visible(session);
        writeln!(
            to,
            "{key} is granted to no other client until the transaction of {session} ends"
        )?;
    }
    if !state.holders.is_empty() {
        let mut table = Table::new(&["HOLDER", "MODE", "HELD", "LEFT", "ID"]);
        for holder in &state.holders {
            let id = holder.id.to_string();
            table.row([
                &*client(holder),
                &mode(holder.mode),
                &known(holder.held_for),
                &left(holder),
                &id,
            ]);
        }
        table.write(to)?;
    }
    if !state.waiters.is_empty() {
        let mut table = Table::new(&["WAITER", "MODE", "WAITS", "SILENT", "LEASE"]);
        for waiter in &state.waiters {
            table.row([
                &*waiter.client.to_string(),
                &mode(waiter.mode),
                &known(waiter.waited),
                &time(waiter.silent),
                &time(waiter.lease),
            ]);
        }
        table.write(to)?;
    }
    Ok(())
}
