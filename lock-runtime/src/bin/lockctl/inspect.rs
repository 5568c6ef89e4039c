//! `lockctl inspect`.

use std::io::{self, Write};

use lock_runtime::{Inspection, LockClient, LockError, text::visible};

use crate::{
    Failure,
    args::Store,
    table::{Table, client, known, left, mode, time},
};

pub(crate) async fn print(store: &Store, key: &str, permits: bool) -> Result<u8, Failure> {
    let locks = store.connect().await?;
    let state = read(&locks, key, permits).await?;
    let mut output = io::stdout().lock();
    if store.json {
        let mut value = serde_json::to_value(&state).map_err(io::Error::from)?;
        value["key"] = key.into();
        value["kind"] = if permits { "permits" } else { "lock" }.into();
        writeln!(output, "{value}")?;
    } else {
        write(key, &state, &mut output)?;
    }
    drop(output);
    locks.shutdown().await;
    Ok(0)
}

pub(crate) async fn read(
    locks: &LockClient,
    key: &str,
    permits: bool,
) -> Result<Inspection, LockError> {
    match permits {
        true => locks.inspect_permits(key).await,
        false => locks.inspect(key).await,
    }
}

pub(crate) fn write(key: &str, state: &Inspection, to: &mut impl Write) -> io::Result<()> {
    let key = visible(key);
    match state.fence {
        _ if state.holders.is_empty() => writeln!(to, "{key} is free")?,
        Some(fence) => writeln!(to, "{key} is held; fencing token {fence}")?,
        None => writeln!(to, "{key} is held")?,
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
