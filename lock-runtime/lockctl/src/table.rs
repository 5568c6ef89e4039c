//! Tables for people and for `awk`: columns of text, without borders.

use std::{
    borrow::Cow,
    io::{self, Write},
    time::Duration,
};

use lock_runtime::{
    Holder,
    text::{brief, visible},
};
use rustix::{stdio::stdout, termios::tcgetwinsize};

/// The shortest column that names are cut to.
const SHORTEST: usize = 12;

/// Rows of columns that are as wide as their widest text.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    /// The width of the terminal, if the first column is cut to it.
    width: Option<usize>,
}

impl Table {
    pub(crate) fn new(titles: &[&str]) -> Self {
        Self {
            rows: vec![titles.iter().map(|title| (*title).to_owned()).collect()],
            width: None,
        }
    }

    /// Cuts long names in the first column so that a row fits on the terminal, if it is one.
    pub(crate) fn fitting(self) -> Self {
        let size = tcgetwinsize(stdout()).ok();
        let width = size.map(|size| usize::from(size.ws_col));
        Self {
            width: width.filter(|width| *width > 0),
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
        if let (Some(width), [first, others @ ..]) = (self.width, &mut widths[..]) {
            let others: usize = others.iter().map(|width| width + 2).sum();
            *first = (*first).min(width.saturating_sub(others).max(SHORTEST));
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
    let reserved = if holder.is_reservation {
        " (reserved)"
    } else {
        ""
    };
    format!("{}{reserved}", holder.client)
}

pub(crate) fn mode(mode: lock_runtime::Mode) -> String {
    match mode {
        lock_runtime::Mode::Permits(permits) => format!("permits/{permits}"),
        _ => mode.as_str().into(),
    }
}
