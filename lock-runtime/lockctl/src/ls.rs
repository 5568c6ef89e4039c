//! `lockctl ls`.

use std::io::{self, Write as _};

use lock_runtime::{Mode, operator::ListedLock, text::visible};

use crate::{
    Failure,
    args::{State, Store},
    table::{Table, client, known, left, mode},
};

pub(crate) async fn print(
    store: &Store,
    prefix: String,
    wanted: Option<State>,
) -> Result<u8, Failure> {
    let locks = store.connect().await?;
    let mut list = locks.list(prefix.as_str());
    let mut output = io::BufWriter::new(io::stdout().lock());
    let (mut found, mut is_empty, mut failed, mut status) = (Vec::new(), true, None, 0);
    while let Some(lock) = list.next().await {
        match lock {
            Ok(lock) if wanted.is_some_and(|it| !it.is_of(&lock.state)) => {}
            Ok(lock) => {
                is_empty = false;
                match store.json {
                    true => {
                        serde_json::to_writer(&mut output, &lock).map_err(io::Error::from)?;
                        output.write_all(b"\n")?;
                    }
                    false => found.push(lock),
                }
            }
            Err(error) => {
                let failure = Failure::from(error);
                // The nodes of a cluster may have one in common.
                if failed.as_ref() != Some(&failure.message) {
                    failure.print(store.json);
                }
                failed = Some(failure.message);
                status = failure.status;
            }
        }
    }
    if !store.json {
        found.sort_by(|one, other| (&one.key, one.kind as u8).cmp(&(&other.key, other.kind as u8)));
        let mut table = Table::new(&TITLES).fitting(&[KEY, HOLDER]);
        found.iter().for_each(|lock| add(&mut table, lock));
        table.write(&mut output)?;
    }
    output.flush()?;
    drop(output);
    if is_empty && failed.is_none() && !store.json {
        explain(&prefix, wanted);
    }
    locks.shutdown().await;
    // The errors have been printed.
    Ok(status)
}

/// The columns of names.
const KEY: usize = 0;
const HOLDER: usize = 2;
const TITLES: [&str; 7] = ["KEY", "MODE", "HOLDER", "HELD", "LEFT", "FENCE", "WAITERS"];

/// Says why the table is empty.
fn explain(prefix: &str, wanted: Option<State>) {
    let literal: String = prefix
        .chars()
        .take_while(|it| !"*?[".contains(*it))
        .collect();
    let shown = visible(prefix);
    let is = match wanted {
        None | Some(State::Held) => "held",
        Some(State::Reserved) => "reserved",
        Some(State::Done) => "done",
        Some(State::Waiting) => "waited for",
    };
    let sentence = match () {
        () if prefix.is_empty() => format!("no lock is {is}"),
        () if literal != prefix => format!(
            "no lock is {is} whose name begins with {shown}; it is a prefix and not a pattern: did you mean `{}`?",
            visible(&literal)
        ),
        () => format!("no lock is {is} whose name begins with {shown}"),
    };
    let _ = writeln!(io::stderr(), "lockctl: {sentence}");
}

fn add(table: &mut Table, lock: &ListedLock) {
    let (key, state) = (lock.key.as_str(), &lock.state);
    let waiters = state.waiters.len().to_string();
    let fence = state.fence.map_or_else(|| "-".into(), |it| it.to_string());
    for holder in &state.holders {
        // The latest token of the key is that of a writer, and of one of several readers.
        let fence = match holder.mode {
            Mode::Exclusive => &fence,
            _ => "-",
        };
        let cells = [
            &*mode(holder.mode),
            &client(holder),
            &known(holder.held_for),
            &left(holder),
            fence,
            &waiters,
        ];
        table.row([key].into_iter().chain(cells));
    }
    if state.holders.is_empty() {
        table.row([key, "-", "-", "-", "-", &fence, &waiters]);
    }
}
