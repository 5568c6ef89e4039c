//! The options of a lock, from the arguments to an expression of type `LockSpec`.

use std::time::Duration;

use proc_macro2::{Ident, Span, TokenStream};
use quote::{quote, quote_spanned};

use crate::{
    args::{Base, Spec, Value, Wait},
    runtime::Runtime,
};

impl Spec {
    /// Expands to the spec, as a constant if possible.
    pub(crate) fn expand(&self, runtime: &Runtime) -> TokenStream {
        let span = Span::mixed_site();
        let mut chain = Chain::on(&self.base, runtime);
        chain.duration("lease", self.lease.as_ref());
        match &self.wait {
            None => {}
            Some(Wait::No) => chain.flag("no_wait", true),
            Some(Wait::AtMost(wait)) => chain.duration("wait", Some(wait)),
        }
        chain.flag("reentrant", self.reentrant);
        chain.flag("strict_order", self.strict_order);
        chain.flag("no_renew", self.no_renew);
        chain.duration("min_hold", self.min_hold.as_ref());
        chain.duration("max_hold", self.max_hold.as_ref());
        let Chain {
            tokens,
            is_constant,
        } = chain;
        if is_constant {
            quote_spanned!(span=> const { #tokens })
        } else {
            tokens
        }
    }
}

/// The call chain `LockSpec::exclusive().lease(..)` built so far.
struct Chain {
    tokens: TokenStream,
    is_constant: bool,
}

impl Chain {
    fn on(base: &Base, runtime: &Runtime) -> Self {
        let span = Span::mixed_site();
        let rt = runtime.at(span);
        let tokens = match base {
            Base::Exclusive => quote_spanned!(span=> #rt::LockSpec::exclusive()),
            Base::Shared => quote_spanned!(span=> #rt::LockSpec::shared()),
            // n is written as 1 + (n - 1), to avoid an `unwrap` in the user's code.
            Base::Permits(Value::Literal(permits)) => {
                let more = permits.get() - 1;
                quote_spanned!(span=> #rt::LockSpec::permits(::core::num::NonZeroU32::MIN.saturating_add(#more)))
            }
            Base::Permits(Value::Expr(permits)) => {
                let permits = permits.value(|span| quote_spanned!(span=> ::core::num::NonZeroU32));
                quote_spanned!(span=> #rt::LockSpec::permits(#permits))
            }
            Base::Expr(spec) => spec.cloned(|span| {
                let rt = runtime.at(span);
                quote_spanned!(span=> #rt::LockSpec)
            }),
        };
        let is_constant = !matches!(base, Base::Permits(Value::Expr(_)) | Base::Expr(_));
        Self {
            tokens,
            is_constant,
        }
    }

    fn flag(&mut self, setter: &str, set: bool) {
        if set {
            let setter = Ident::new(setter, Span::mixed_site());
            self.tokens.extend(quote!(.#setter()));
        }
    }

    fn duration(&mut self, setter: &str, value: Option<&Value<Duration>>) {
        let span = Span::mixed_site();
        let value = match value {
            None => return,
            Some(Value::Literal(duration)) => {
                let (secs, nanos) = (duration.as_secs(), duration.subsec_nanos());
                quote_spanned!(span=> ::core::time::Duration::new(#secs, #nanos))
            }
            Some(Value::Expr(given)) => {
                self.is_constant = false;
                given.value(|span| quote_spanned!(span=> ::core::time::Duration))
            }
        };
        let setter = Ident::new(setter, span);
        self.tokens.extend(quote_spanned!(span=> .#setter(#value)));
    }
}
