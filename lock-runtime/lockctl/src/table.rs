//! Tables for people and for `awk`: columns of text, without borders.

use std::{
    borrow::Cow,
    io::{self, Write},
    time::Duration,
};

use lock_runtime::{
    operator::Holder,
    text::{brief, visible},
};
use rustix::{stdio::stdout, termios::tcgetwinsize};

/// The shortest column that names are cut to.
const SHORTEST: usize = 12;
/// Follows the name of a client that has released the lock.
const RESERVED: &str = " (reserved)";
const DONE: &str = " (done)";

/// Rows of columns that are as wide as their widest text.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    /// The width of the terminal, if these columns are cut to it.
    width: Option<usize>,
    names: &'static [usize],
}

impl Table {
    pub(crate) fn new(titles: &[&str]) -> Self {
        Self {
            rows: vec![titles.iter().map(|title| (*title).to_owned()).collect()],
            width: None,
            names: &[],
        }
    }

    /// Cuts long names in these columns so that a row fits on the terminal, if it is one.
    pub(crate) fn fitting(self, names: &'static [usize]) -> Self {
        let size = tcgetwinsize(stdout()).ok();
        let width = size.map(|size| usize::from(size.ws_col));
        Self {
            width: width.filter(|width| *width > 0),
            names,
            ..self
        }
    }

    /// Adds a row. Control characters are escaped: names come from other programs.
    pub(crate) fn row<'a>(&mut self, cells: impl IntoIterator<Item = &'a str>) {
        self.rows.push(cells.into_iter().map(visible).collect());
    }

    /// Writes the rows, and removes them.
    pub(crate) fn write(&mut self, to: &mut impl Write) -> io::Result<()> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width_of = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let mut widths: Vec<_> = (0..columns).map(width_of).collect();
        if let Some(width) = self.width {
            for &name in self.names {
                // The last column needs no space behind it.
                let all = widths.iter().map(|width| width + 2).sum::<usize>();
                let all = all.saturating_sub(2);
                let fitting = widths[name].saturating_sub(all.saturating_sub(width));
                widths[name] = widths[name].min(fitting.max(SHORTEST));
            }
        }
        for row in self.rows.drain(..) {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                let cell = cut(cell, *width);
                line.push_str(&cell);
                let missing = width - cell.chars().count() + 2;
                line.extend(std::iter::repeat_n(' ', missing));
            }
            writeln!(to, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// The beginning of a text that is too long.
fn cut(text: &str, width: usize) -> Cow<'_, str> {
    match text.char_indices().nth(width) {
        None => text.into(),
        Some(_) => {
            let states = [RESERVED, DONE].into_iter();
            let mut stated = states.filter_map(|state| Some((text.strip_suffix(state)?, state)));
            if let Some((name, state)) = stated.next().filter(|(_, state)| width > state.len()) {
                return format!("{}{state}", cut(name, width - state.len())).into();
            }
            let beginning: String = text.chars().take(width.saturating_sub(1)).collect();
            format!("{beginning}…").into()
        }
    }
}

/// A duration in one word.
pub(crate) fn time(duration: Duration) -> String {
    brief(duration).replace(' ', "")
}

pub(crate) fn known(duration: Option<Duration>) -> String {
    duration.map_or_else(|| "-".into(), time)
}

pub(crate) fn left(holder: &Holder) -> String {
    holder.ttl.map_or_else(|| "endless".into(), time)
}

/// The name of the client, and whether it has released the lock.
pub(crate) fn client(holder: &Holder) -> String {
    let state = match (holder.is_done, holder.is_reservation) {
        (true, _) => DONE,
        (false, true) => RESERVED,
        (false, false) => "",
    };
    format!("{}{state}", holder.client)
}

pub(crate) fn mode(mode: lock_runtime::Mode) -> String {
    match mode {
        lock_runtime::Mode::Permits(permits) => format!("permits/{permits}"),
        _ => mode.as_str().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_is_seen_in_a_name_that_is_cut() {
        assert_eq!(
            cut("orders-7c9f6d5b8 (reserved)", 20),
            "orders-7… (reserved)"
        );
        assert_eq!(cut("orders-1 (reserved)", 20), "orders-1 (reserved)");
    }

    #[test]
    fn names_are_cut_to_the_width_of_the_terminal_and_numbers_are_not() {
        let row = [
            "order:customer-4711:invoice:2026-11",
            "permits/3",
            "orders-7c9f6d5b8-xk2lp:1",
            "1795456170925944",
            "12",
        ];
        for (width, key, holder) in [
            (80, "order:customer-…", "orders-7c9f6d5b8-xk2lp:1"),
            (60, "order:custo…", "orders-7c9f…"),
        ] {
            let mut table = Table {
                width: Some(width),
                names: &[0, 2],
                ..Table::new(&["KEY", "MODE", "HOLDER", "FENCE", "WAITERS"])
            };
            table.row(row);
            let mut text = Vec::new();
            table.write(&mut text).unwrap();
            let text = String::from_utf8(text).unwrap();
            let line = text.lines().nth(1).unwrap();
            let cells: Vec<_> = line.split_whitespace().collect();
            assert_eq!(cells, [key, row[1], holder, row[3], row[4]], "{width}");
            assert!(
                text.lines().all(|line| line.chars().count() <= 80),
                "{text}"
            );
        }
    }
}
