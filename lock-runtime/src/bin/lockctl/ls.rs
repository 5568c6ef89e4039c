//! `lockctl ls`.

use std::io::{self, Write as _};

use lock_runtime::ListedLock;

use crate::{
    Failure,
    args::Store,
    table::{Table, client, known, left, mode},
};

/// The number of rows that are aligned together.
const TOGETHER: usize = 10_000;

pub(crate) async fn print(store: &Store, prefix: String) -> Result<u8, Failure> {
    let locks = store.connect().await?;
    let mut list = locks.list(prefix);
    let mut output = io::BufWriter::new(io::stdout().lock());
    let titles = ["KEY", "MODE", "HOLDER", "HELD", "LEFT", "FENCE", "WAITERS"];
    let (mut table, mut failed) = (Table::new(&titles), None);
    while let Some(lock) = list.next().await {
        match lock {
            Ok(lock) if store.json => {
                serde_json::to_writer(&mut output, &lock).map_err(io::Error::from)?;
                output.write_all(b"\n")?;
            }
            Ok(lock) => {
                add(&mut table, &lock);
                if table.len() >= TOGETHER {
                    table.write(&mut output)?;
                }
            }
            Err(error) => {
                let failure = Failure::from(error);
                failure.print(store.json);
                failed = Some(failure.status);
            }
        }
    }
    if !store.json {
        table.write(&mut output)?;
    }
    output.flush()?;
    drop(output);
    locks.shutdown().await;
    // The errors have been printed.
    Ok(failed.unwrap_or(0))
}

fn add(table: &mut Table, lock: &ListedLock) {
    let (key, state) = (lock.key.as_str(), &lock.state);
    let waiters = state.waiters.len().to_string();
    let fence = state.fence.map_or_else(|| "-".into(), |it| it.to_string());
    for holder in &state.holders {
        let cells = [
            &mode(holder.mode),
            &client(holder),
            &known(holder.held_for),
            &left(holder),
            &fence,
            &waiters,
        ];
        table.row([key].into_iter().chain(cells.map(|cell| &**cell)));
    }
    if state.holders.is_empty() {
        table.row([key, "-", "-", "-", "-", &fence, &waiters]);
    }
}
