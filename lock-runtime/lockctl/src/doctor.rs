//! `lockctl doctor`.

use std::io;

use anstyle::{AnsiColor, Style};
use lock_runtime::{health::Verdict, text::visible};

use crate::{Failure, args::Store, status};

pub(crate) async fn report(store: &Store, url: Option<String>) -> Result<u8, Failure> {
    use io::Write as _;

    let mut store = store.clone();
    store.url = url.or(store.url);
    let (builder, url) = store.settings()?;
    // A store that is away is the subject of the report, and no error.
    let locks = builder.connect_lazy(&url)?;
    let health = locks.health().await;
    let verdict = health.verdict();
    if store.json {
        let text = serde_json::to_string(&health).map_err(io::Error::from)?;
        writeln!(io::stdout(), "{text}")?;
    } else {
        let report = health.to_string();
        let (first, rest) = report.split_once('\n').unwrap_or((&report, ""));
        let color = match verdict {
            Verdict::Healthy => AnsiColor::Green,
            Verdict::Degraded => AnsiColor::Yellow,
            _ => AnsiColor::Red,
        };
        let style = Style::new().bold().fg_color(Some(color.into()));
        // Writes colours to terminals only.
        let mut output = anstream::stdout();
        writeln!(output, "{style}{first}{style:#}")?;
        for line in rest.lines() {
            writeln!(output, "{}", visible(line))?;
        }
    }
    locks.shutdown().await;
    Ok(match verdict {
        Verdict::Healthy => 0,
        Verdict::Degraded => status::NO,
        _ => status::UNAVAILABLE,
    })
}
