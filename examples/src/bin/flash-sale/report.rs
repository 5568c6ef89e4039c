//! The result of a run: a table for people, and one line for programs.

use std::process::ExitCode;

use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};

use crate::{customers::Experience, options::Options, server::Account};

/// A finished sale, as seen by the customers, the servers and the store.
#[derive(Debug)]
pub(crate) struct Report<'a> {
    pub(crate) options: &'a Options,
    pub(crate) experience: &'a Experience,
    pub(crate) servers: &'a [Account],
    pub(crate) leftover_keys: u64,
}

impl Report<'_> {
    /// Prints the report. The exit code indicates whether the lock prevented overselling.
    pub(crate) fn print(&self) -> ExitCode {
        let Self {
            options,
            experience,
            leftover_keys,
            ..
        } = self;
        let (seconds, rps) = (experience.elapsed.as_secs_f64(), self.requests_per_second());
        println!("{}\n\n{}", self.table(), self.verdict());
        println!(
            "requests={} sold={} oversold={} errors={} leftover_keys={leftover_keys} seconds={seconds:.2} rps={rps:.0} \
             p50_ms={:.1} p99_ms={:.1}",
            options.requests,
            experience.sold,
            self.oversold(),
            experience.errors(),
            self.wait_ms(0.5),
            self.wait_ms(0.99),
        );
        let races = self.oversold() + self.unbooked();
        let failed = experience.errors() + leftover_keys > 0 || (races > 0 && !options.no_lock);
        if failed {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        }
    }

    fn table(&self) -> Table {
        let Self {
            options,
            experience,
            servers,
            leftover_keys,
        } = self;
        let mut table = Table::new();
        table.load_preset(UTF8_FULL_CONDENSED);
        let mut row = |name: &str, value: String| {
            table.add_row([name.to_owned(), value]);
        };
        row("sold", format!("{} of {}", experience.sold, options.stock));
        row("sold out", experience.sold_out.to_string());
        for (kind, (count, message)) in &experience.errors {
            row(
                &format!("error {kind}"),
                format!("{count}, for example: {message}"),
            );
        }
        row(
            "sold per server",
            servers
                .iter()
                .map(|server| server.sold.to_string())
                .collect::<Vec<_>>()
                .join(" + "),
        );
        row("sales missing in the stock", self.unbooked().to_string());
        row("locks left behind", leftover_keys.to_string());
        row(
            "requests per second",
            format!("{:.0}", self.requests_per_second()),
        );
        row(
            "half are answered within",
            format!("{:.1} ms", self.wait_ms(0.5)),
        );
        row(
            "99 % are answered within",
            format!("{:.1} ms", self.wait_ms(0.99)),
        );
        table
    }

    fn verdict(&self) -> String {
        let (stock, sold) = (self.options.stock, self.experience.sold);
        match (self.oversold(), self.unbooked()) {
            (0, 0) if self.options.no_lock => {
                "Lucky: nothing went wrong without the lock. Try more --requests.".into()
            }
            (0, 0) => format!("The lock held: every sale took its own piece out of {stock}."),
            (oversold, unbooked) => format!(
                "{}: {sold} sales took {} pieces out of {stock}; {oversold} customers get nothing.",
                if self.options.no_lock {
                    "No lock"
                } else {
                    "The lock failed"
                },
                self.sold_by_servers() - unbooked,
            ),
        }
    }

    /// Confirmed sales beyond the stock.
    fn oversold(&self) -> u64 {
        self.experience.sold.saturating_sub(self.options.stock)
    }

    /// Lost updates: sales that are missing in the stock, because another sale has overwritten
    /// them.
    fn unbooked(&self) -> u64 {
        // All servers share one stock, and have read it after their last sale.
        let left = self.servers.first().map_or(0, |server| server.left);
        self.sold_by_servers()
            .saturating_sub(self.options.stock.saturating_sub(left))
    }

    fn sold_by_servers(&self) -> u64 {
        self.servers.iter().map(|server| server.sold).sum()
    }

    fn requests_per_second(&self) -> f64 {
        self.options.requests as f64 / self.experience.elapsed.as_secs_f64()
    }

    fn wait_ms(&self, quantile: f64) -> f64 {
        self.experience.waits.value_at_quantile(quantile) as f64 / 1000.0
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    /// Returns the counts of a report: oversold, unbooked.
    fn count(confirmed: u64, servers: &[Account]) -> (u64, u64) {
        let options = Options::parse_from(["flash-sale", "--stock=10"]);
        let experience = Experience {
            sold: confirmed,
            ..Experience::new().unwrap()
        };
        let report = Report {
            options: &options,
            experience: &experience,
            servers,
            leftover_keys: 0,
        };
        (report.oversold(), report.unbooked())
    }

    #[test]
    fn every_sale_beyond_the_stock_and_every_lost_update_is_counted() {
        let server = |sold, left| Account {
            sold,
            left,
            leftover_keys: 0,
        };
        assert_eq!(count(10, &[server(4, 0), server(6, 0)]), (0, 0));
        assert_eq!(count(12, &[server(5, 0), server(7, 0)]), (2, 2));
        assert_eq!(
            count(6, &[server(6, 7)]),
            (0, 3),
            "two sold the same piece, with some left"
        );
    }
}
