({
  init: config => ({ stage: 0, counts: Object.fromEntries(config.items.map(item => [item.id, 1])), city: '', code: '',
    shipping: config.shippings[0], gift: false, submitted: false }),
  view: (state, kit, config) => {
    const move = by => kit.go(() => { state.stage += by; });
    const steps = [() => [...config.items.map(item => kit.row(item.name, kit.text(`${item.name}: ${state.counts[item.id]}`),
      kit.button(`less-${item.id}`, 'Less', kit.set(() => { state.counts[item.id] = Math.max(0, state.counts[item.id] - 1); })),
      kit.button(`more-${item.id}`, 'More', kit.set(() => { state.counts[item.id] += 1; }))))],
    () => [kit.bar(kit.input('city', 'City', state, 'city')),
      kit.bar(kit.select('shipping', 'Shipping', config.shippings, state.shipping, value => { state.shipping = value; }))],
    () => [kit.bar(kit.input('code', 'Voucher', state, 'code')),
      kit.bar(kit.tick('gift', 'Gift wrap', state.gift, value => { state.gift = value; }))]];
    if (state.submitted) return [kit.text('Thank you for your order.')];
    return [kit.bar(kit.text(['Cart', 'Delivery', 'Payment'][state.stage], 'note')), ...steps[state.stage](),
      kit.bar(state.stage > 0 ? kit.button('back', 'Back', move(-1)) : null,
        state.stage < 2 ? kit.button('continue', 'Continue', move(1), { class: 'main' })
          : kit.button('order', 'Place order', kit.go(() => { state.submitted = true; }), { class: 'main' }))];
  },
  goals: (state, config) => {
    const met = { city: want => state.city.trim() === want, count: want => state.counts[want.id] === want.count,
      shipping: want => state.shipping === want, code: want => state.code.trim() === want, gift: want => state.gift === want };
    const asked = Object.fromEntries(config.wanted);
    const counts = config.items.every(item => (asked.count && asked.count.id === item.id) || state.counts[item.id] === 1);
    return [...config.wanted.map(([kind, want]) => state.submitted && met[kind](want)),
      counts && ('shipping' in asked || state.shipping === config.shippings[0]) && ('code' in asked || !state.code)
        && ('gift' in asked || !state.gift)];
  },
})
